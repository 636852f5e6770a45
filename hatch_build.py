"""Compile the kernel and the entry at an installation, which goes on without them where they cannot be made."""

from __future__ import annotations

import os
import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ZIG = "ziglang>=0.13; sys_platform == 'linux' and platform_machine in 'x86_64 aarch64'"
"""A C compiler from the package index, for a machine that has none."""
MACHINE = "HOOKD_WHEEL_MACHINE"
"""Environment variable that names the machine for which `make dist` makes a wheel."""
PLATFORMS = ("manylinux_2_17", "manylinux2014", "musllinux_1_1")
"""Where the shared objects load: they are linked to no library (deploy/dist/objects.py checks that)."""


class NativeHook(BuildHookInterface[Any]):
    """Runs before each wheel, editable ones too."""

    def dependencies(self) -> list[str]:
        """Ask the installer for a compiler where the system has none."""
        return [] if self.target_name != "wheel" or self._script()["has_compiler"]() else [ZIG]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Put the shared objects beside their sources, and name the machines that the wheel is for."""
        if self.target_name != "wheel":
            return
        machine = os.environ.get(MACHINE)
        if machine:
            self._add(build_data, self._script()["build"](machine=machine), PLATFORMS, machine)
            return
        try:
            made = self._script()["build"]()
        except OSError as error:
            self.app.display_warning(
                f"hookd: the native libraries were not built; hookd uses torch operations and Python instead: {error}"
            )
            return
        system, _, machine = sysconfig.get_platform().replace(".", "_").partition("-")
        self._add(build_data, made, (system,), machine)

    def _add(self, build_data: dict[str, Any], made: list[Path], platforms: tuple[str, ...], machine: str) -> None:
        build_data["artifacts"] += [str(path.relative_to(self.root)) for path in made]
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + ".".join(f"{platform}_{machine}" for platform in platforms)

    def _script(self) -> dict[str, Any]:
        return runpy.run_path(str(Path(self.root, "hookd", "native", "build.py")))
