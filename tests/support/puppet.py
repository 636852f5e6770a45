"""The target that knows all that a guest could change in it, see tests/targets/puppet.py."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import forked, training
from tests.support.processes import Process, wait_until
from tests.support.training import Job

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

PUPPET = Job("puppet.py")
GUEST = ("hookd", "_hookd", "_pluggy", "pluggy")
_RESIDUE = ("_hookd.target.boot.fork.",)  # the trampoline of os.register_at_fork, which cannot be undone


@contextlib.contextmanager
def started(**environment: str | Path) -> Iterator[Process]:
    made = training.environment(**environment)
    with Process(PUPPET.command(), env=made, cwd=PUPPET.path.parent, stdin=True, popen=forked.start) as process:
        process.expect("^ready$")
        process.ask("cost", "^cost ")  # whatever a first call imports or allocates
        probe(process)
        yield process


def probe(process: Process) -> dict[str, Any]:
    """Return its answer about its own state."""
    found: dict[str, Any] = json.loads(process.ask("probe", "^probe (.*)").group(1))
    return found


def assert_as_before(process: Process, before: dict[str, Any], kept: Collection[str] = ()) -> None:
    """Compare two probes; new modules of the standard library do not count, one function is the residue of forks.

    The tool waits until the agent's last thread has closed the page; that thread then still has to end.

    Args:
        process: the puppet.
        before: its probe from before.
        kept: objects of hookd's that stay, by their full names.
    """
    wait_until(lambda: probe(process)["tasks"] == before["tasks"], what="the last thread to end")
    now = probe(process)
    added, residue = set(now.pop("modules")) - set(before["modules"]), now.pop("objects")
    assert not [name for name in added if name.partition(".")[0].startswith(GUEST)]
    cached = set(now.pop("path importer cache")) - set(before["path importer cache"])
    assert not [path for path in cached if not Path(path).is_dir()], "an import of the target would look there"
    changed = {key: (before[key], now[key]) for key in now if now[key] != before[key]}
    assert not changed, f"(before, now) of what is not as it was: {changed}"
    alive = [
        name
        for name in residue
        if name.startswith("_hookd.target") and not name.startswith(_RESIDUE) and name not in kept
    ]
    assert not alive, f"more than the fork trampoline is still alive: {alive}"
