"""The state of a process as seen from outside; a guest could change it, its training does not. A detach must restore it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from tests.support.processes import wait_until

_LINES = ("SigBlk", "Umask", "Uid", "Gid", "Groups", "CapEff", "NoNewPrivs", "Seccomp", "Cpus_allowed")
"""Of /proc/PID/task/TID/status. Signal handlers are left out: torch's data loader sets one when it begins."""


def state(pid: int) -> dict[str, Any]:
    """Return the state, or {} if the process has ended."""
    process = Path(f"/proc/{pid}")
    try:
        return {
            **{name: os.readlink(process / name) for name in ("cwd", "root")},
            **{name: (process / name).read_text() for name in ("limits", "oom_score_adj", "timerslack_ns")},
            "threads": {int(task.name): found for task in (process / "task").iterdir() if (found := _of_thread(task))},
            "ours": _ours(process),
        }
    except (FileNotFoundError, ProcessLookupError):
        return {}


def _of_thread(task: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in (task / "status").read_text().splitlines())
        found: dict[str, Any] = {name: value.strip() for name, _, value in lines if name in _LINES}
        number = int(task.name)
        scheduled = os.sched_getscheduler(number), os.getpriority(os.PRIO_PROCESS, number)
        return {**found, "name": (task / "comm").read_text(), "scheduled": scheduled}
    return {}  # it has just ended


def _ours(process: Path) -> list[str]:
    """Return the names of hookd's parts of a process: descriptors, mappings."""
    found = [line.split(maxsplit=5)[5] for line in (process / "maps").read_text().splitlines() if "hookd" in line]
    for one in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(one))
    return sorted(name for name in found if "memfd:hookd" in name)


def assert_same(pid: int, before: dict[str, Any]) -> None:
    """Compare with the earlier state of the threads that existed then and still do. hookd's last thread may still have to end.

    An earlier agent, which another tool holds, must stay.
    """

    def changed() -> list[tuple[Any, Any]]:
        now = state(pid)
        if not now or not before:
            return []
        was_attached = bool(before["ours"])
        pairs = [(before[name], now[name]) for name in now if name not in ("threads", *(["ours"] * was_attached))]
        threads, main = now["threads"], before["threads"].get(pid, {}).get("name")
        for number in before["threads"].keys() & threads.keys():
            was, is_now = dict(before["threads"][number]), dict(threads[number])
            if number != pid and was["name"] == main:  # one that was just starting had not set its own yet
                was["name"] = is_now.get("name")
            pairs.append((was, is_now))
        ours = [("", one["name"]) for one in threads.values() if one["name"] == "hookd\n" and not was_attached]
        return [(was, is_now) for was, is_now in pairs if was != is_now] + ours

    wait_until(lambda: not changed(), what=lambda: f"(before, now) of what is not as it was: {changed()}")
