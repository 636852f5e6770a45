"""Evaluation of expressions, for `hookd eval`.

Each is evaluated in a thread of its own, so that neither the training nor hookd's own thread waits for it. An expression that
takes too long is interrupted by an exception in its thread: a Python loop receives it at once, a call into C when it returns.
A thread cannot be killed; one that does not end is reported, and left behind when the agent leaves.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import itertools
import reprlib
import traceback
from typing import TYPE_CHECKING, Any

import torch

from hookd.errors import ControlError
from hookd.target.boot.spawn import Thread
from hookd.target.entry.threads import is_ours
from hookd.target.plugins.faults import Failure
from hookd.target.remote.stacks import MOST_FRAMES, thread_frames
from hookd.wire.originals import Lock, clock
from hookd.wire.page.layout import clean

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.target.boot.arming import Life
    from hookd.target.entry.threads import Threads
    from hookd.target.events.step_count import StepCount
    from hookd.target.events.steps import Steps
    from hookd.target.modeltree.names import Names
    from hookd.target.plugins.incidents import Incidents
    from hookd.wire.agent import Caller, EvaluationResult, EvaluationState, Request
    from hookd.wire.page import PageWriter

MOST = 4
"""The most evaluations in progress at a time: more than one, so that one that does not end does not block the next."""
MOST_EXPRESSION = 16 << 10
MOST_TEXT = 64 << 10
"""The longest result or traceback, in characters."""
SHOWN = 400
"""The longest expression in the page, in characters."""
LONGEST_S = 3600.0
GRACE_S = 0.5
"""Time that an interrupted evaluation has to end."""
EXIT_S = 1.0
"""How long the end of the process waits for evaluations."""
_NUMBERS = itertools.count(1)


class Interrupted(BaseException):  # noqa: N818 - an interruption, not an error
    """Raised in an evaluation that takes too long; an `except Exception` in the training's code does not catch it."""


class Evaluation:
    """One evaluation of an expression.

    Args:
        by: `uid` and `pid` of the user who asks.

    Attributes:
        state: running, done, raised or interrupted.
        is_given_up: whether it did not end when it was interrupted after its time limit.
        answer: the outcome, as fields of the answer.
    """

    def __init__(self, expression: str, by: Caller, limit_s: float) -> None:
        self.number = next(_NUMBERS)
        self.expression, self.by, self.limit_s = expression, by, limit_s
        self.state: EvaluationResult = "running"
        self.is_given_up = False
        self.answer: EvaluationState = {}
        self.thread: Thread | None = None
        self._started = clock.monotonic()
        self._lock = Lock()
        self._is_inside = self._is_interrupted = False
        self._again = 0.0  # value of `seconds` from which it may be interrupted again

    def seconds(self) -> float:
        """Return the time since its beginning, in seconds."""
        return clock.monotonic() - self._started

    def run(self, local: Threads, scope: Callable[[], dict[str, object]]) -> None:
        """Evaluate the expression with the names that `scope` returns; called once, in a thread of its own."""
        try:
            self._run(local, scope)
        except Interrupted:  # it arrived after the evaluation
            self._leave()
        finally:
            if self.state == "running":
                self.state = "interrupted"

    def _run(self, local: Threads, scope: Callable[[], dict[str, object]]) -> None:
        state: EvaluationResult = "interrupted"
        answer: EvaluationState = {}
        try:
            code = compile(self.expression.strip(), "<eval>", "eval")
            local.thread.busy = True  # its module calls do not belong to the training
            names = scope()
            with torch.no_grad():
                self._is_inside = True
                value = eval(code, names)  # noqa: S307 - what this file is for
                state, answer = "done", _described(value)
                del value
        except Interrupted:
            state = "interrupted"
        except BaseException as exc:  # noqa: BLE001 - also SystemExit: no code of the training's runs in this thread
            state, answer = "raised", {"type": type(exc).__name__, "traceback": _traceback(exc)}
        self._leave()
        self.answer = {**answer, "seconds": self.seconds()}
        self.state = state

    def _leave(self) -> None:
        """End the time in which the evaluation may be interrupted, and absorb an interruption that is still pending.

        A later one would be printed to the training's standard error. A pending one cannot be withdrawn: CPython up to 3.12
        sets a flag for all threads, which only the raising of the exception clears (PyThreadState_SetAsyncExc in
        Python/pystate.c, eval_frame_handle_pending in Python/ceval_gil.c, 3.12). While the flag is set, every call of the
        training takes longer, and one that is traced by a debugger does not end (3.11). So this thread schedules one more
        exception in itself, which replaces any pending one, and waits for it.
        """
        while True:
            try:
                with self._lock:
                    self._is_inside = False
                if self._is_interrupted:
                    self._is_interrupted = False
                    self._raise()
                    while True:
                        clock.sleep(0)
                return
            except Interrupted:
                continue

    def interrupt(self) -> None:
        """Raise `Interrupted` in its thread when that next runs Python code; later calls repeat it, after half of `GRACE_S`."""
        if self.seconds() < self._again:
            return
        self._again = self.seconds() + GRACE_S / 2
        with self._lock:  # the thread has not ended, so no other thread has its ident
            if self._is_inside:
                self._is_interrupted = True
                self._raise()

    def _raise(self) -> None:
        assert self.thread is not None
        ident, kind = ctypes.c_ulong(self.thread.ident or 0), ctypes.py_object(Interrupted)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, kind)


class Evaluations:
    """The evaluations in progress, and finished ones until their results are fetched. Used in hookd's own thread."""

    def __init__(
        self,
        *,
        page: PageWriter,
        life: Life,
        local: Threads,
        names: Names,
        steps: Steps,
        count: StepCount,
        incidents: Incidents,
    ) -> None:
        self._page, self._life, self._local, self._incidents = page, life, local, incidents
        self._names, self._steps, self._count = names, steps, count
        self._all: dict[int, Evaluation] = {}

    def begin(self, request: Request, by: Caller) -> dict[str, int]:
        """Begin to evaluate the request's `expression` for the user `by`, for `limit_s` seconds at most; return its `number`.

        Raises:
            ControlError: reason "bad-request"; "busy": too many evaluations have not ended; or "no-threads".
        """
        expression, limit_s = request.get("expression"), request.get("limit_s")
        if not isinstance(expression, str) or not 0 < len(expression) <= MOST_EXPRESSION:
            raise ControlError(f"an expression has 1 to {MOST_EXPRESSION} characters", reason="bad-request")
        if not isinstance(limit_s, (int, float)) or not 0 < limit_s <= LONGEST_S:
            raise ControlError(f"an expression may take up to {LONGEST_S:g} s", reason="bad-request")
        running = self.running()
        if len(running) >= MOST:
            texts = "; ".join(clean(evaluation.expression, 80) for evaluation in running)
            raise ControlError(f"{len(running)} expressions have not ended: {texts}", reason="busy")
        evaluation = Evaluation(expression, by, limit_s)
        # Log it before it begins, because it may end the process.
        self._page.log("info", f"eval begins, {_asker(by)}: {clean(expression, SHOWN)}")
        evaluation.thread = Thread(functools.partial(self._run, evaluation))
        evaluation.thread.start()
        self._all[evaluation.number] = evaluation
        return {"number": evaluation.number}

    def state(self, request: Request) -> EvaluationState:
        """Return the state of the evaluation with the request's `number`.

        Returns:
            `state` and `seconds`; if it is done, `type`, `result` (and `value` if JSON can represent it) and `is_cut`; if it
            raised, `type` and `traceback`; if it is running, `frames` (its stack, innermost first) and `is_given_up`.
        """
        evaluation = self._all.get(request.get("number", 0))
        if evaluation is None:
            raise ControlError("there is no such evaluation", reason="bad-request")
        self._limit(evaluation)
        if evaluation.state != "running":
            del self._all[evaluation.number]
            return {"state": evaluation.state, "seconds": evaluation.seconds(), **evaluation.answer}
        is_given_up = evaluation.is_given_up
        frames = thread_frames(evaluation.thread) if is_given_up else []
        return {"state": "running", "seconds": evaluation.seconds(), "frames": frames, "is_given_up": is_given_up}

    def tick(self) -> None:
        """Enforce the time limits, even if no client asks any more."""
        for evaluation in self.running():
            self._limit(evaluation)

    def end(self) -> None:
        """Interrupt all evaluations, and wait up to `EXIT_S` for them to end."""
        end = clock.monotonic() + EXIT_S
        for evaluation in self.running():
            evaluation.interrupt()
        for evaluation in self.running():
            if evaluation.thread is not None:
                evaluation.thread.join(max(0.0, end - clock.monotonic()))

    def running(self) -> list[Evaluation]:
        """Return the evaluations that have not ended, and forget old results that were not fetched."""
        for number in list(self._all)[:-MOST]:
            if self._all[number].state != "running":
                del self._all[number]
        return [evaluation for evaluation in self._all.values() if evaluation.state == "running"]

    def _limit(self, evaluation: Evaluation) -> None:
        if evaluation.state != "running" or evaluation.seconds() < evaluation.limit_s:
            return
        evaluation.interrupt()
        if evaluation.seconds() >= evaluation.limit_s + GRACE_S and not evaluation.is_given_up:
            evaluation.is_given_up = True
            self._note(evaluation, "still running")

    def _run(self, evaluation: Evaluation) -> None:
        evaluation.run(self._local, self._scope)
        state, kind = evaluation.state, evaluation.answer.get("type")
        self._note(evaluation, state if state == "interrupted" else f"{state}: {kind}")

    def _scope(self) -> dict[str, object]:
        """Return the names that an expression may use."""
        models = [root for _, root in self._names.live_roots()]
        return {
            # The program's builtins, not the payload's: the payload's `__import__` finds modules that the program lacks.
            "__builtins__": builtins, "__name__": "hookd_eval", "model": models[0] if models else None, "models": models,
            "optimizers": self._steps.optimizers(), "step": self._count.absolute(), "torch": torch,
        }  # fmt: skip

    def _note(self, evaluation: Evaluation, outcome: str) -> None:
        """Report the evaluation as an incident, if the agent is still there."""
        text = clean(evaluation.expression, SHOWN)
        fields = {"by": evaluation.by, "expression": text, "outcome": outcome, "seconds": evaluation.seconds()}
        try:
            if self._life.is_live:
                message = f"{text}: {outcome}, {_asker(evaluation.by)}, after {evaluation.seconds():.3g} s"
                self._incidents.report("hookd", "eval", message, fields)
        except Failure:  # the page was closed just now
            pass


def _asker(by: Caller) -> str:
    return f"by user {by.get('uid')} (process {by.get('pid')})"


def _described(value: Any) -> EvaluationState:
    kind = type(value)
    short = Short()
    text = short.repr(value)
    answer: EvaluationState = {
        "type": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
        "result": clean(text, MOST_TEXT),
    }
    is_small = kind in (bool, float, str, type(None)) or (kind is int and -(2**63) <= value < 2**63)
    if is_small and short.left > 0:
        answer["value"] = value
    return {**answer, "is_cut": short.left <= 0}


class Short(reprlib.Repr):
    """A `repr` of limited length: the first elements of containers, and the object's own `repr` for anything else.

    Attributes:
        left: number of characters that may still be written; after them only `...` is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left = MOST_TEXT
        self.maxlevel = 16
        for name in ("maxlist", "maxtuple", "maxdict", "maxset", "maxfrozenset", "maxdeque", "maxarray"):
            setattr(self, name, 1000)
        self.maxstring = self.maxother = self.maxlong = MOST_TEXT

    def repr1(self, x: Any, level: int) -> str:
        """Return the text of a value, nested or not."""
        if self.left <= 0:
            return "..."
        before = self.left
        text = super().repr1(x, level)
        self.left -= max(0, len(text) - (before - self.left))  # nested values have been counted already
        return text


def _traceback(error: BaseException) -> str:
    """Return the traceback of an error, without hookd's frames."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)[:MOST_FRAMES] if not is_ours(frame.filename)]
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
    return clean("".join([*head, *traceback.format_exception_only(type(error), error)]), MOST_TEXT)
