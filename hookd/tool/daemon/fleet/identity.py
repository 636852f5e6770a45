"""The identity of a target, from its page and its process.

Every field of the page is checked.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from hookd.errors import HookdError
from hookd.tool.attach import process_snapshot
from hookd.tool.daemon.fleet import jobs
from hookd.tool.linux import commandline, proc
from hookd.tool.linux.accounts import account, uid_of
from hookd.tool.linux.owner import user_name
from hookd.wire import labels
from hookd.wire.page.layout import clean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hookd.tool.attach.process_snapshot import Snapshot
    from hookd.tool.daemon.fleet.jobs import Job
    from hookd.wire.identity import Identity as PageIdentity


@dataclass(frozen=True)
class Identity:
    """The identity that a target reports. Every field is checked, because the page belongs to another process.

    `name` is what a person or a scheduler calls its run, else the name of its script; see `run`.
    """

    name: str
    rank: str
    job: Job
    is_named: bool = False
    local_rank: int = 0
    world_size: int = 1
    script: str = ""
    python: str = ""
    torch: str = ""
    method: str = ""
    agent_version: str = ""
    uid: int = -1  # the user who is accountable for it, see `account`
    process_uid: int = -1  # as in the kernel; may be of a range that is assigned to that user
    ppid: int = 0
    started: float = 0.0
    attached: float = 0.0
    step_offset: int | None = None
    keep: bool = False

    @classmethod
    def of_page(cls, raw: PageIdentity, *, pid: int) -> Identity:
        """Read the identity of a page; a value of a wrong type counts as missing."""
        seen = _snapshot(pid, settles=False)  # it has an agent, so its exec is over
        script = text(raw, "script")
        offset, process_uid = raw.get("step_offset"), uid_of(pid)
        name, world_size = labels.clean_run(text(raw, "run")), max(1, _whole(raw, "world_size"))
        # Older agents do not say so.
        is_named = raw.get("is_named", bool(name) and name != labels.script_name(script)) is True
        return cls(
            name=name or labels.script_name(script),
            is_named=is_named,
            rank=labels.clean(text(raw, "rank")) or "0",
            local_rank=_whole(raw, "local_rank"),
            world_size=world_size,
            job=jobs.of(pid, seen, world_size),
            script=script,
            python=text(raw, "python"),
            torch=text(raw, "torch"),
            method=text(raw, "method"),
            agent_version=text(raw, "agent_version"),
            uid=account(process_uid),
            process_uid=process_uid,
            ppid=_parent(pid),
            started=_real(raw, "started"),
            attached=_real(raw, "attached"),
            step_offset=offset if _is_whole(offset) else None,
            keep=raw.get("keep") is True,
        )

    @classmethod
    def of_process(cls, pid: int) -> Identity:
        """Guess the identity of a process from outside.

        This is for a process without an agent yet, or with an unreadable page.
        """
        seen = _snapshot(pid, settles=True)
        environ, script = (seen.environ, script_of(seen.cmdline)) if seen is not None else ({}, "")
        process_uid = uid_of(pid)
        name, world_size = labels.given_run(environ), labels.world_size(environ)
        return cls(
            name=name or labels.script_name(script),
            is_named=bool(name),
            rank=labels.rank_label(environ),
            local_rank=labels.local_rank(environ),
            world_size=world_size,
            job=jobs.of(pid, seen, world_size),
            script=script,
            uid=account(process_uid),
            process_uid=process_uid,
            ppid=_parent(pid),
        )

    @property
    def run(self) -> str:
        """The run, which no other job has: its name if somebody has named it, else that of the script with a tag."""
        return self.name if self.is_named else labels.tagged(self.name, self.job.tag)

    @property
    def is_shared(self) -> bool:
        """Whether ranks of several launchers can be one run."""
        return self.is_named or self.job.is_shared

    @functools.cached_property
    def user(self) -> str:
        """The name of its owner. It is the number if the owner has no name here, and "" if the owner is unknown."""
        return user_name(self.uid)


OF_THE_KERNEL = ("uid", "process_uid", "ppid", "job")
"""Fields that are read from the process, by its pid, and not from the page."""


def script_of(cmdline: Sequence[str]) -> str:
    """Return the script of a Python command line, or the module after `-m`. The result is "" if there is neither."""
    name, is_module = commandline.program(cmdline)
    return clean(name.rpartition(".")[2] + ".py" if is_module and name else name)


def text(raw: Mapping[str, object], key: str) -> str:
    """Return a text of a page's object, "" if there is none."""
    value = raw.get(key)
    return clean(value) if isinstance(value, str) else str(value) if _is_whole(value) else ""


def _is_whole(value: object) -> TypeGuard[int]:
    return type(value) is int and abs(value) < 1 << 63


def _whole(raw: Mapping[str, object], key: str) -> int:
    value = raw.get(key)
    return value if _is_whole(value) else 0


def _real(raw: Mapping[str, object], key: str) -> float:
    value = raw.get(key)
    return float(value) if isinstance(value, float) or _is_whole(value) else 0.0


def _snapshot(pid: int, *, settles: bool) -> Snapshot | None:
    try:
        return process_snapshot.take(pid, settles=settles)
    except (HookdError, OSError, LookupError, ValueError):  # it ended meanwhile
        return None


def _parent(pid: int) -> int:
    try:
        return proc.status(pid).ppid
    except (HookdError, OSError, LookupError, ValueError):
        return 0
