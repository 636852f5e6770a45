"""Where the measurements are made: the device, a directory, and hookd's commands there."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
"""Of one training."""


@dataclass
class Table:
    """The findings of a part.

    Attributes:
        title, text: above the table.
        head, rows: its cells, as text.
        failures: what is not as it must be, one sentence each.
        figures: the same as numbers, for programs.
    """

    title: str
    text: str
    head: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """A machine, as the parts see it.

    Attributes:
        is_dry: whether there is no GPU: everything is made on the processor, with tiny models, to see that it works.
        scratch: a directory for hookd's sockets and files.
    """

    is_dry: bool
    scratch: Path

    @property
    def device(self) -> str:
        """The device of the trainings."""
        return "cpu" if self.is_dry else "cuda"

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of all processes, in which hookd keeps everything below `scratch`."""
        own = {
            "HOOKD_CONTROL": str(self.scratch / "control.sock"), "HOOKD_STATE_DIR": str(self.scratch / "state"),
            "HOOKD_LISTEN": "127.0.0.1:0", "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
        }  # fmt: skip
        return {**os.environ, **own}

    def training(self, name: str, steps: int) -> list[str]:
        """Return the command of a training."""
        words = [
            sys.executable,
            str(ROOT / "tests/gpu/trainings.py"),
            name,
            "--steps",
            str(steps),
            "--device",
            self.device,
        ]
        return [*words, "--tiny"] if self.is_dry else words

    def hookd(self, *words: str) -> list[str]:
        """Return a command of hookd."""
        return [sys.executable, "-m", "hookd", *words]

    def run(self, words: Sequence[str], limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Run a command to its end.

        Raises:
            TimeoutExpired: it took longer than `limit_s`; then it was killed.
        """
        return subprocess.run(
            words, env=self.environment, cwd=self.scratch, capture_output=True, text=True, timeout=limit_s, check=False
        )

    def start(self, words: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command whose output is read line by line."""
        return subprocess.Popen(
            words, env=self.environment, cwd=self.scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


def described() -> dict[str, str]:
    """Return what the machine is."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu": _cpu(),
    }
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda), "driver": _driver()}
    return found


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def _driver() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"
