"""Compile the kernel and the entry at an installation, which goes on without them where they cannot be made."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ZIG = "ziglang>=0.13; sys_platform == 'linux' and platform_machine in 'x86_64 aarch64'"
"""A C compiler from the package index, for a machine that has none."""


class NativeHook(BuildHookInterface[Any]):
    """Runs before each wheel, editable ones too."""

    def dependencies(self) -> list[str]:
        """Ask the installer for a compiler where the system has none."""
        return [] if self.target_name != "wheel" or self._script()["has_compiler"]() else [ZIG]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Put the shared objects beside their sources; a wheel that has not those of all machines is for this kind alone."""
        if self.target_name != "wheel":
            return
        script = self._script()
        try:
            made: list[Path] = script["build"]()
        except OSError as error:
            self.app.display_warning(
                f"hookd: the native libraries were not built; hookd uses torch operations and Python instead: {error}"
            )
            return
        build_data["artifacts"] += [str(path.relative_to(self.root)) for path in made]
        if len(made) < len(script["MACHINES"]) * len(script["SOURCES"]):
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")

    def _script(self) -> dict[str, Any]:
        return runpy.run_path(str(Path(self.root, "hookd", "native", "build.py")))
