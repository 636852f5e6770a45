"""What an installation does beside copying: it compiles the numeric kernel, and goes on without one where it cannot."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNEL = "hookd/native/kernel.so"


class KernelHook(BuildHookInterface[Any]):
    """Runs before each wheel, editable ones too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Put the kernel beside its source, and say that the wheel is for this kind of machine only."""
        if self.target_name != "wheel":
            return
        build = runpy.run_path(str(Path(self.root, "hookd", "native", "build.py")))["build"]
        try:
            build()
        except OSError as error:
            self.app.display_warning(f"hookd: no numeric kernel, torch's own operations take its place: {error}")
            return
        build_data["artifacts"].append(KERNEL)
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
