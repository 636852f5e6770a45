"""Compile the kernel and the entry at an installation, which goes on without them where there is no compiler."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MADE = ["hookd/native/kernel.so", "hookd/native/entry.so"]


class NativeHook(BuildHookInterface[Any]):
    """Runs before each wheel, editable ones too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Put the shared objects beside their sources, and say that the wheel is for this kind of machine only."""
        if self.target_name != "wheel":
            return
        build = runpy.run_path(str(Path(self.root, "hookd", "native", "build.py")))["build"]
        try:
            build()
        except OSError as error:
            self.app.display_warning(
                f"hookd: no numeric kernel and no entry: torch's own operations and Python take their place: {error}"
            )
            return
        build_data["artifacts"] += MADE
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
