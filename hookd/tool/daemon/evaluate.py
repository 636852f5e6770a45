"""Evaluation of an expression in a target: only if the configuration allows it, and always logged. Blocking."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from hookd.errors import ControlError, HookdError, PermissionDenied, UsageError
from hookd.tool.attach import Control
from hookd.tool.daemon.actions import read_timeout
from hookd.tool.daemon.audit import who
from hookd.tool.linux import proc
from hookd.wire.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookd.wire.agent import Caller
    from hookd.wire.answer import EvaluatedTarget, Evaluation

ANSWER_S = 5.0
"""Timeout for the agent's answer, in addition to the expression's own limit."""
LONGEST_S = 3600.0
MOST_EXPRESSION = 16 << 10
"""Maximum length in characters; both limits equal the agent's (`hookd/target/remote/evaluate.py`)."""
_log = logging.getLogger(__name__)


def require_allowed(pid: int, by: Caller, *, allowed: bool, is_embedded: bool) -> None:
    """Raise and log unless the configuration allows evaluation.

    Raises:
        PermissionDenied: reason "eval-not-allowed".
    """
    if allowed and not is_embedded:
        return
    _log.warning("eval in process %d refused, %s", pid, who(by))
    if is_embedded:
        text, hint = "a foreground attach does not evaluate expressions", "Use `hookd serve` with [eval] allow = true."
    else:
        text = "this daemon's configuration does not allow evaluating expressions"
        hint = "Its operator can set [eval] allow = true in the configuration file and restart it."
    raise PermissionDenied(text, reason="eval-not-allowed", hint=hint)


def evaluate(pid: int, body: Mapping[str, object], by: Caller) -> EvaluatedTarget:
    """Evaluate `body["expression"]` for `body["timeout_s"]` seconds at most; log caller, expression and outcome.

    Returns:
        `pid`, `state` (done, raised, interrupted, running), `seconds`, and the keys of `hookd.target.remote.evaluate`;
        `error` if the target no longer answers.

    Raises:
        HookdError: the evaluation was not started.
    """
    expression, timeout_s = body.get("expression"), read_timeout(body, 5.0, LONGEST_S)
    if not isinstance(expression, str) or not 0 < len(expression) <= MOST_EXPRESSION:
        raise UsageError(f"an expression has 1 to {MOST_EXPRESSION} characters", reason="bad-request")
    _log.info("eval in process %d begins, %s: %s", pid, who(by), one_line(expression))
    began = time.monotonic()
    try:
        answer = _asked(pid, expression, timeout_s, by)
    except HookdError as error:
        _log.warning("eval in process %d failed, %s: %s", pid, who(by), one_line(error.message))
        raise
    outcome = " ".join(filter(None, (answer["state"], one_line(answer.get("type") or ""))))
    _log.info("eval in process %d: %s after %.3g s, %s", pid, outcome, time.monotonic() - began, who(by))
    return {"pid": pid, **answer}


def _asked(pid: int, expression: str, limit_s: float, by: Caller) -> Evaluation:
    if proc.status(pid).state in "Tt":
        raise ControlError(f"process {pid} is stopped", reason="stopped", hint=f"`kill -CONT {pid}` resumes it.")
    with Control.connect(pid, ANSWER_S) as control:
        began = time.monotonic()
        try:
            number = control.request("eval", expression=expression, limit_s=limit_s, by=dict(by)).get("number")
            return _followed(control, number, began + limit_s + ANSWER_S)
        except ControlError as error:
            if error.reason != "gone":
                raise
            return _silent(error, time.monotonic() - began)


def _followed(control: Control, number: object, until: float) -> Evaluation:
    """Poll until there is an outcome; the agent itself enforces the limit."""
    pause_s = 0.001
    while time.monotonic() < until:
        answer = control.request("eval_look", number=number)
        if answer.get("state") != "running" or answer.get("is_given_up") is True:
            return _read(answer)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
    raise ControlError(f"the agent in process {control.pid} timed out", reason="gone")


def _silent(error: ControlError, seconds: float) -> Evaluation:
    """Return the answer for an expression that was sent to a target that has not answered since."""
    text = (
        f"it was sent, but nothing has come back: {error.message}; the target hangs or has ended, perhaps because of the "
        "expression. If it has not started, it will not"
    )
    return {"state": "running", "seconds": seconds, "error": text, "frames": []}


def _read(answer: Mapping[str, object]) -> Evaluation:
    """Return the known keys of an agent's answer, with their types checked."""
    state, seconds, frames = (answer.get(key) for key in ("state", "seconds", "frames"))
    read: Evaluation = {
        "state": state if state in ("done", "raised", "interrupted") else "running",
        "seconds": float(seconds) if isinstance(seconds, (int, float)) else 0.0,
    }
    if read["state"] == "running":
        read["frames"] = [str(frame) for frame in frames] if isinstance(frames, list) else []
    for key in ("type", "result", "traceback"):
        if key in answer:
            read[key] = str(answer[key])
    if read["state"] == "done":
        read["is_cut"] = answer.get("is_cut") is True
    value = answer.get("value")
    if "value" in answer and (value is None or isinstance(value, (bool, int, float, str))):
        read["value"] = value
    return read
