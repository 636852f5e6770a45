"""Sections on a failed test's processes and on the machine, for its report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.processes import STARTED, descendants, states

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


def add_to(report: pytest.TestReport) -> None:
    """Add sections to the report of a failed test: the last lines of its processes, all states, the load of the machine."""
    for process in STARTED:
        report.sections.append((f"process {process.pid}", process.describe()))
    report.sections.append(("processes at the failure", "\n".join(states(_pids()))))
    report.sections.append(("descriptors of this worker", _descriptors()))
    report.sections.append(("machine at the failure", "\n".join(_load())))


def forget_ended() -> None:
    """Forget the processes of earlier tests, except those that still run."""
    STARTED[:] = [process for process in STARTED if process.popen.poll() is None]


def _pids() -> list[int]:
    """Return all processes of this worker's PID namespace, or those below this one where it has none of its own."""
    if "WORKER_UNSHARE" in os.environ:
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return descendants(os.getpid())


def _descriptors() -> str:
    """Count the open descriptors of this process; discover.find_page does not find a page behind the 64th."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    maps = Path("/proc/self/maps").read_text().count("/memfd:hookd-page")
    return (
        f"{len(links)}, of which {sum('/memfd:hookd-page' in link for link in links)} are pages; {maps} maps of pages"
    )


def _load() -> Iterator[str]:
    yield f"load {' '.join(f'{load:.1f}' for load in os.getloadavg())} on {os.cpu_count()} processors"
    yield from (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    for name in ("cpu", "memory", "io"):
        try:
            yield f"pressure of {name}: {Path('/proc/pressure', name).read_text().splitlines()[0]}"
        except OSError:
            continue  # a kernel without CONFIG_PSI
