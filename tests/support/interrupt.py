"""Attach to a process again and again, killed at another stage each time: `python -m tests.support.interrupt`.

A stage is the first time that a function of certain files is called or returns, or that a line of LINES is reached. The
stages are those of a real attach, so a new one cannot be forgotten, and the product contains nothing for this purpose.
After each kill, one more, undisturbed attach must succeed. Prints the stages.

    tool PID     the tool is killed; the agent is a stub
    helper PID   the tool's helper, which holds the target while it is stopped, is killed; the agent is a stub
    agent PID    the tool is killed; the agent is the real one, and the attach ends with its lease; this is repeated
                                 until the target ends; a line "all" says that all stages have been tried
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookd.errors import AttachError, HookdError
from hookd.tool.attach import AttachRequest, Control, attach, detach, live
from hookd.tool.config import PluginSpec
from hookd.tool.inject import helper
from hookd.tool.linux import proc
from tests.support import stub

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

HOME = str(Path(helper.__file__).parent)
HOMES = {HOME, str(Path(live.__file__).parent)}
OF_TOOL = ("delivery.py", "helper.py", "live.py", "remote_debug.py")
OF_HELPER = ("injector.py", "ptrace.py")
OF_AGENT = ("live.py",)
LINES = ("_deliver",)  # where the words of the mailbox are written one after the other
REQUEST = AttachRequest((PluginSpec("timing"),), timeout_s=2, lease_s=2)
PATIENT = AttachRequest((PluginSpec("timing"),), timeout_s=60, lease_s=2)


class Stages:
    """Follows this process and kills it at stage number `last`, whose name it writes to the descriptor `writer`."""

    def __init__(self, last: int, files: Collection[str], writer: int) -> None:
        self._last, self._files, self._writer = last, files, writer
        self._lines = LINES if files is OF_TOOL else ()
        self._seen: set[tuple[str, str, object]] = set()

    def follow(self, frame: Any, event: str, _: object) -> Any:
        directory, _, file = frame.f_code.co_filename.rpartition("/")
        if directory not in HOMES or file not in self._files:
            return None
        function = frame.f_code.co_name
        is_line = event == "line"
        stage = (file, function, frame.f_lineno if is_line else event)
        if (not is_line or function in self._lines) and stage not in self._seen:
            self._seen.add(stage)
            if len(self._seen) == self._last:
                os.write(self._writer, " ".join(map(str, stage)).encode())
                os.kill(os.getpid(), signal.SIGKILL)
        return self.follow


def in_child(act: Callable[[], object], stages: Stages) -> int:
    """Run a function in a child process; return the exit status: 0, or -9 if it was killed at its stage."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sys.settrace(stages.follow)
            act()
            sys.settrace(None)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_the_tool(pid: int, files: Collection[str], act: Callable[[], object], again: Callable[[], object]) -> int:
    """Go through all stages once; return their number."""
    stage, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        stage += 1
        ours, theirs = os.pipe()
        code = in_child(act, Stages(stage, files, theirs))
        os.close(theirs)
        with os.fdopen(ours) as reader:
            print(stage, reader.read(), flush=True)
        proc.status(pid)
        if code == -signal.SIGKILL:
            again()
    assert code == 0, code
    return stage - 1


SUICIDAL = """
import sys, os, signal
last, seen = {last}, set()
def follow(frame, event, _):
    stage = (frame.f_code.co_filename, frame.f_code.co_name, event)
    if stage[0].startswith({home!r}) and stage[0].endswith({files!r}) and event in ("call", "return") and stage not in seen:
        seen.add(stage)
        if len(seen) == last:
            os.kill(os.getpid(), signal.SIGKILL)
from hookd.tool.inject import selftest
selftest.check = lambda: None  # it goes through most stages, but with a child of its own
sys.setprofile(follow)
main()
"""


def kill_the_helper(pid: int) -> int:
    """Go through the stages of the helper once; the tool must report the kill. Return their number."""
    start = helper._START
    stage, is_killed = 0, True
    while is_killed:
        stage += 1
        suicidal = SUICIDAL.format(last=stage, home=HOME, files=OF_HELPER)
        helper._START = start.rsplit("main()", 1)[0] + suicidal.replace("{", "{{").replace("}", "}}")
        is_killed = False
        try:
            stub.inject(pid, request=REQUEST)
        except AttachError as exc:
            is_killed = "exited with status -9" in exc.message
            if not is_killed:
                raise
        finally:
            helper._START = start
        proc.status(pid)
        if is_killed:
            stub.inject(pid, request=PATIENT)
    return stage - 1


def attach_and_hold(pid: int) -> None:
    result = attach(pid, REQUEST)
    assert result.loaded == ("timing",)
    with Control.connect(pid) as control:
        control.request("lease", seconds=2)


def attach_and_detach(pid: int) -> None:
    attach(pid, PATIENT)
    detach(pid)


def main(kind: str, pid: int) -> None:
    if kind == "helper":
        print("stages", kill_the_helper(pid))
    elif kind == "tool":
        quick, patient = (functools.partial(stub.inject, pid, request=request) for request in (REQUEST, PATIENT))
        print("stages", kill_the_tool(pid, OF_TOOL, quick, patient))
    else:
        with contextlib.suppress(HookdError):
            while True:
                count = kill_the_tool(pid, OF_AGENT, lambda: attach_and_hold(pid), lambda: attach_and_detach(pid))
                print("all", count, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
