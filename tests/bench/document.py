"""`docs/benchmarks.md`: a section for each bench, with the machine, the versions, the command and the time of its run."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hookd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.tables import Report

HEAD = """# Benchmarks

Written by `make bench`: do not edit. `python -m tests.bench --only NAME` writes one section anew. A ratio is of CPU time of the
training thread, to the same without the tool; 1.01 is one per cent more. The controls say what the machine itself does
to two things that are the same.
"""
PEERS = ("torch", "numpy", "wandb", "transformers", "probing")
SECTION = re.compile(r"<!-- begin (\w+) -->\n(.*?)<!-- end \1 -->\n", re.DOTALL)


@dataclass
class Document:
    """The file as sections, in the order of the list of benches."""

    order: Sequence[str]
    sections: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None, order: Sequence[str]) -> Document:
        text = path.read_text() if path is not None and path.exists() else ""
        return cls(order, dict(SECTION.findall(text)))

    def put(self, name: str, title: str, about: str, provenance: str, report: Report) -> None:
        self.sections[name] = f"## {title}\n\n{_method(about)}\n\n{provenance}\n\n{report.markdown()}\n"

    def markdown(self) -> str:
        known = [name for name in self.order if name in self.sections]
        return HEAD + "".join(f"\n<!-- begin {name} -->\n{self.sections[name]}<!-- end {name} -->\n" for name in known)

    def write(self, path: Path) -> None:
        """Write the file."""
        path.write_text(self.markdown())


def _method(about: str) -> str:
    """Return the docstring of a module, without its command lines and its output format."""
    said = "\n".join(line for line in about.strip().splitlines() if not line.startswith(" "))
    said = re.sub(r"\s*Prints one JSON object[^.]*\.", "", said)
    return re.sub(r"\n{2,}", "\n\n", said)


@dataclass(frozen=True)
class Machine:
    """The machine, and the time when a bench began."""

    began: float
    load: float

    @classmethod
    def now(cls) -> Machine:
        return cls(time.time(), os.getloadavg()[0])

    def provenance(self, name: str, *, quick: bool) -> str:
        """Describe everything that is needed to judge or repeat the figures, at the end of a run."""
        command = f"python -m tests.bench --only {name}" + " --quick" * quick
        day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.began))
        minutes = (time.time() - self.began) / 60
        memory = psutil.virtual_memory().total / 2**30
        load = f"load average {self.load:.1f} before, {os.getloadavg()[0]:.1f} after"
        system = f"{platform.system()} {platform.release()}"
        return "\n".join([
            f"- `{command}`, {day}, {minutes:.1f} minutes, hookd {__version__} at {_commit()}",
            f"- {_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {system}; {load}",
            f"- CPython {platform.python_version()}, {', '.join(_versions())}",
        ])  # fmt: skip


def _processor() -> str:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()


def _versions() -> list[str]:
    found = []
    for package in PEERS:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return found


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True,
                          text=True, check=False)  # fmt: skip
    return done.stdout.strip() or "an unknown commit"
