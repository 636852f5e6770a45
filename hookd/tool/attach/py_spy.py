"""Read stacks from outside with py-spy, if it is installed: `hookd[stack]`.

Source: py-spy 0.4.3, `py-spy dump --json`: a list of `{"thread_id", "thread_name", "os_thread_id", "active", "owns_gil",
"frames": [{"name", "filename", "line", "module", ...}]}`; `--native` cannot go with `--nonblocking`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookd.errors import HookdError
from hookd.tool.linux import permission, proc

if TYPE_CHECKING:
    from hookd.wire.stack import Frame, Stack

TIMEOUT_S = 8.0
BLOCKING_TIMEOUT_S = 30.0
"""Longer, because for native frames py-spy first reads the symbols of all libraries; the process runs meanwhile."""
_MOST_BYTES = 16 << 20
_MOST_FRAMES = 400


def program() -> str | None:
    """Return the path of py-spy: next to the Python that runs hookd, else from PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def dump(pid: int, *, native: bool = False, blocking: bool = False) -> list[Stack]:
    """Read the stacks of a process with py-spy.

    Args:
        pid: of the process; it need not have an agent, and may be stopped.
        native: include frames of C and C++; the process is stopped meanwhile.
        blocking: stop the process, so that all stacks are of the same moment.

    Returns:
        The stacks; their `tid` are of our pid namespace, and no frame is marked as hookd's own.

    Raises:
        HookdError: reason "no-py-spy", "py-spy" (it failed; the message contains its error), "timeout", or "died": the process
            ended or became another program meanwhile.
    """
    path = program()
    if path is None:
        hint = "pip install 'hookd[stack]', or py-spy itself"
        raise HookdError("py-spy is not installed", reason="no-py-spy", hint=hint)
    how = ["--native"] if native else [] if blocking else ["--nonblocking"]
    limit_s = BLOCKING_TIMEOUT_S if native or blocking else TIMEOUT_S
    try:
        ticks, running = proc.start_ticks(pid), proc.program(pid)
    except OSError as exc:
        raise permission.explain(pid, exc) from exc
    try:
        done = subprocess.run(
            [path, "dump", "--pid", str(pid), "--json", "--full-filenames", *how],
            capture_output=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as exc:
        raise HookdError(f"py-spy has not ended after {limit_s:g} s", reason="timeout") from exc
    except OSError as exc:
        raise HookdError(f"py-spy cannot be started: {exc.strerror}", reason="py-spy") from exc
    if done.returncode != 0:
        error = done.stderr.decode(errors="replace").partition("Stack backtrace:")[0].strip()
        raise HookdError(f"py-spy failed: {' '.join(error.split())[:400]}", reason="py-spy", hint=_cure(error))
    # py-spy reads by pid: never show stacks of another process or program.
    proc.require_same(pid, ticks)
    proc.require_program(pid, running)
    return _threads(done.stdout)


def _cure(error: str) -> str:
    if "ermission" in error or "EPERM" in error:
        return "It needs the right to trace the process: root, or CAP_SYS_PTRACE."
    return ""


def _threads(output: bytes) -> list[Stack]:
    try:
        listed = json.loads(output[:_MOST_BYTES])
        return [
            {
                "tid": thread["os_thread_id"],
                "name": str(thread["thread_name"] or ""),
                "frames": [_frame(frame) for frame in thread["frames"][:_MOST_FRAMES]],
                "left_out": max(0, len(thread["frames"]) - _MOST_FRAMES),
            }
            for thread in listed
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise HookdError("unexpected output from py-spy", reason="py-spy") from exc


def _frame(frame: dict[str, Any]) -> Frame:
    """Convert one frame; py-spy sets `module`, the library, only for frames of C and C++."""
    library = frame.get("module")
    line = frame["line"] if isinstance(frame["line"], int) else 0
    file = str(frame["filename"] or library or "")
    return {"function": str(frame["name"]), "file": file, "line": line, "own": False, "native": library is not None}
