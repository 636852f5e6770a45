"""Faults that are planted in trainings on a GPU, and what the daemon says of each."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from tests.gpu.place import ROOT, Table

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable, Iterator

    from tests.gpu.place import Place

PATIENCE_S = 90.0
FAULTS = {
    "nan": "An activation in the middle of the model is NaN.",
    "hang": "A kernel does not end, and the training waits for it.",
    "memory": "A layer asks for more memory than the device has.",
}
EXPECTED = {"nan": ("nan", "1"), "hang": ("hang", ""), "memory": ("lost", "")}
"""The kind of the incident that must come, and the module that it names."""


def part(place: Place, faults: Iterable[str] = FAULTS) -> Table:
    """Plant each fault, and wait for the incident."""
    table = Table(
        "Faults",
        "Each is planted in a small training that `hookd serve` watches by rule.",
        ("fault", "what hookd said", "after"),
    )
    with _daemon(place):
        for fault in faults:
            _add(table, place, fault)
    return table


def _add(table: Table, place: Place, fault: str) -> None:
    kind, module = EXPECTED[fault]
    began = time.monotonic()
    with place.start([*_command(place), fault]) as process:
        try:
            found = _incident(place, process, kind)
        finally:
            process.kill()
            process.communicate()
    seconds = time.monotonic() - began
    if found is None:
        table.failures.append(f"{fault}: no incident `{kind}` within {PATIENCE_S:.0f} s")
    elif module and found["module"] != module:
        table.failures.append(f"{fault}: the incident names {found['module']!r} instead of {module!r}")
    said = "nothing" if found is None else f"`{kind}`: {found['message']}"
    table.rows.append([FAULTS[fault], said, f"{seconds:.0f} s"])
    table.figures[fault] = {"kind": kind, "seconds": seconds, "message": said}


def _command(place: Place) -> list[str]:
    return [sys.executable, str(ROOT / "tests/gpu/faulty.py"), place.device]


def _incident(place: Place, process: subprocess.Popen[str], kind: str) -> dict[str, Any] | None:
    """Wait for an incident of this process."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        asked = place.run(place.hookd("incidents", "--json", "--pid", str(process.pid), "--kind", kind))
        rows = json.loads(asked.stdout)["incidents"] if asked.returncode == 0 else []
        if rows:
            return dict(rows[0])
        time.sleep(0.5)
    return None


@contextlib.contextmanager
def _daemon(place: Place) -> Iterator[None]:
    """Run a daemon that attaches to the faulty trainings, and calls a silence of five seconds a hang."""
    config = place.scratch / "hookd.toml"
    config.write_text('[hang]\nafter_s = 5\nstart_s = 20\n[[rule]]\nmatch = "faulty.py"\n')
    with place.start(place.hookd("serve", "--config", str(config))) as daemon:
        try:
            yield
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.communicate()
