"""Stacks as py-spy reads them from outside, where it is installed: `hookd[stack]`. Tool side.

Source: py-spy 0.4.3, `py-spy dump --json`: a list of `{"thread_id", "thread_name", "os_thread_id", "active", "owns_gil",
"frames": [{"name", "filename", "line", "module", ...}]}`; `--native` cannot go with `--nonblocking`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hookd.errors import HookdError
from hookd.tool.linux import permission, proc

TIMEOUT_S = 8.0
BLOCKING_TIMEOUT_S = 30.0
"""With native frames it reads the symbols of all libraries first, while the process runs on."""
_MOST_BYTES = 16 << 20
_MOST_FRAMES = 400


def program() -> str | None:
    """Find py-spy: beside the Python that runs hookd, else in PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def dump(pid: int, *, native: bool = False, blocking: bool = False) -> dict[str, Any]:
    """Have py-spy read the stacks of a process.

    Args:
        pid: of the process; it need not have an agent, and need not run.
        native: frames of C and C++ too; the process stands still meanwhile.
        blocking: let the process stand still, so that the stacks are of one moment.

    Returns:
        `threads`: of each `tid` (as this side sees it), `name`, `frames` (innermost first, see `hookd.target.remote.stacks`, and
        `native`), `owns_gil`; `seconds` that it took.

    Raises:
        HookdError: reason "no-py-spy", "py-spy" (it failed, with what it says), "timeout", or "died": the process ended or
            became another program meanwhile.
    """
    path = program()
    if path is None:
        hint = "pip install 'hookd[stack]', or py-spy itself"
        raise HookdError("py-spy is not installed", reason="no-py-spy", hint=hint)
    how = ["--native"] if native else [] if blocking else ["--nonblocking"]
    limit_s = BLOCKING_TIMEOUT_S if native or blocking else TIMEOUT_S
    began = time.monotonic()
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
        told = done.stderr.decode(errors="replace").partition("Stack backtrace:")[0].strip()
        raise HookdError(f"py-spy failed: {' '.join(told.split())[:400]}", reason="py-spy", hint=_cure(told))
    # py-spy goes by pid: what it read of another process, or of another program, is shown to nobody.
    proc.require_same(pid, ticks)
    proc.require_program(pid, running)
    return {"threads": _threads(done.stdout), "seconds": time.monotonic() - began}


def _cure(told: str) -> str:
    if "ermission" in told or "EPERM" in told:
        return "It needs the right to trace the process: root, or CAP_SYS_PTRACE."
    return ""


def _threads(output: bytes) -> list[dict[str, Any]]:
    try:
        listed = json.loads(output[:_MOST_BYTES])
        return [
            {
                "tid": one["os_thread_id"],
                "name": str(one["thread_name"] or ""),
                "owns_gil": bool(one["owns_gil"]),
                "frames": [_frame(frame) for frame in one["frames"][:_MOST_FRAMES]],
                "left_out": max(0, len(one["frames"]) - _MOST_FRAMES),
            }
            for one in listed
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise HookdError("py-spy has written something else than expected", reason="py-spy") from exc


def _frame(frame: dict[str, Any]) -> dict[str, Any]:
    """Read one frame; those of C and C++ name the library that they are in."""
    library = frame.get("module")
    line = frame["line"] if isinstance(frame["line"], int) else 0
    file = str(frame["filename"] or library or "")
    return {"function": str(frame["name"]), "file": file, "line": line, "native": library is not None}
