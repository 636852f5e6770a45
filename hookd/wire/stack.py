"""The threads of a target, as `hookd stack PID --json` prints them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from hookd.wire.identity import Identity


class PythonFrame(TypedDict):
    """A frame of Python code, as the agent sees it."""

    function: str
    file: str
    line: int
    """0 if unknown."""
    own: bool
    """Whether it is code of hookd."""


class Frame(PythonFrame):
    """A frame of a stack."""

    native: bool
    """Whether it is code of C or C++."""


class PythonStack(TypedDict):
    """The Python frames of a thread."""

    tid: int | None
    """As the target sees it; None for a thread that Python did not start."""
    name: str
    frames: list[PythonFrame]
    """Innermost first."""
    left_out: int
    """Number of further frames."""


class PythonStacks(TypedDict):
    """The answer of an agent that is asked for the stacks of its process."""

    threads: list[PythonStack]
    left_out: int
    """Number of further threads."""


class Stack(TypedDict):
    """The stack of a thread."""

    tid: int | None
    name: str
    frames: list[Frame]
    """Innermost first."""
    left_out: int
    """Number of missing frames."""


class Beat(TypedDict):
    """Where a thread is, according to the page."""

    phase: str
    module: str | None
    """The innermost module."""
    type: str | None
    """The name of its class."""
    modules: list[str]
    """It and the modules around it, from the root on."""
    step: int
    """Counted from the attach."""
    moves: bool
    """Whether it has changed while it was watched."""


class Kernel(TypedDict):
    """The state of a thread, according to the kernel."""

    state: str
    """In words."""
    where: str
    """The function of the kernel in which it waits; empty if there is none."""


class StackedThread(Stack):
    """A thread with all that is known of it."""

    beat: Beat | None
    kernel: Kernel | None
    """None if the thread is gone."""


class Way(TypedDict):
    """How a part was read."""

    by: str | None
    """None: it could not be read."""
    problem: str
    """Why another way had to be taken; empty if none."""
    seconds: float | None


class Stacks(TypedDict):
    """The threads of a target."""

    pid: int
    identity: Identity
    """The process, as the agent describes it."""
    state: str
    """Of the process, according to the kernel."""
    last_step_s: float | None
    """Seconds since the last step ended; None if none has ended."""
    watched_s: float
    """How long the page was watched."""
    ways: dict[str, Way]
    """Of `page`, `python` and, if asked for, `native`."""
    threads: list[StackedThread]
