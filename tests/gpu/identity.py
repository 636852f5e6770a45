"""Trainings that are watched end with the same bits as without hookd."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.gpu.place import Table
from tests.gpu.trainings import CANNOT, TRAININGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.gpu.place import Place

STEPS, PAUSE_S = 12, 0.4
"""Of each training, and between the steps of one that is attached to."""
PLUGINS = (
    "nan:every=1",
    "activations:every=1",
    "timing:every=1",
    "memory",
    "optimizer",
    "fingerprint:every=1,buffer=64",
)
"""Those that look at most, at every step."""
WATCHED = ("without hookd", "again", "hookd run", "every plugin at every step", "attached and detached")


def part(place: Place, names: Iterable[str] = TRAININGS) -> Table:
    """Train each in five ways, and compare the checksums."""
    table = Table(
        "The training is the same",
        f"Checksums of weights, optimizer, losses and random state after {STEPS} steps, in deterministic mode.",
        ("training", *WATCHED[1:]),
    )
    for name in names:
        _add(table, place, name)
    return table


def _add(table: Table, place: Place, name: str) -> None:
    first = place.run(place.training(name, STEPS))
    if first.returncode == CANNOT:
        table.rows.append([name, f"not tried: {first.stdout.strip()}", "", "", ""])
        return
    expected = _checksum(first.stdout)
    if expected is None:
        table.failures.append(f"{name} failed without hookd: {first.stderr[-500:]}")
        return
    cells = []
    for how, found in _watched(place, name):
        is_same = found == expected
        cells.append("same" if is_same else "differs")
        if not is_same and how != "again":
            table.failures.append(f"{name}: {how} ends with {found} instead of {expected}")
    if cells[0] == "differs":
        table.failures.append(f"{name} is not deterministic by itself")
    table.rows.append([name, *cells])
    table.figures[name] = expected


def _watched(place: Place, name: str) -> Iterator[tuple[str, str | None]]:
    """Yield each way, and the checksum."""
    command = place.training(name, STEPS)
    every = [word for plugin in PLUGINS for word in ("-p", plugin)]
    yield "again", _checksum(place.run(command).stdout)
    yield "hookd run", _checksum(place.run(place.hookd("run", "--", *command)).stdout)
    yield "every plugin", _checksum(place.run(place.hookd("run", *every, "--", *command)).stdout)
    yield "attached", _attached(place, name)


def _attached(place: Place, name: str) -> str | None:
    """Attach after the third step, and detach some steps later."""
    with place.start([*place.training(name, STEPS), "--pause", str(PAUSE_S)]) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 3"):
                with place.start(place.hookd("attach", str(process.pid))) as attach:
                    assert attach.stdout is not None
                    for said in attach.stdout:
                        if said.startswith("attached"):
                            break
                    attach.terminate()  # it detaches
                    attach.communicate()
        process.wait()
    return _checksum("".join(lines))


def _checksum(text: str) -> str | None:
    return next((line.split()[1] for line in text.splitlines() if line.startswith("checksum ")), None)
