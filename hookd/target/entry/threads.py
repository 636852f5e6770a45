"""The state of each thread that calls modules."""

from __future__ import annotations

import contextlib
import posix
import threading
from typing import TYPE_CHECKING, Any

import torch

from hookd.target.boot.spawn import NAME, OWN
from hookd.target.events.phases import Spent
from hookd.wire.frames import innermost_frames
from hookd.wire.originals import Local, thread
from hookd.wire.page import MODULE, PHASES

if TYPE_CHECKING:
    from hookd.api.events import Call, Module, Returned
    from hookd.api.refs import Passing
    from hookd.wire.page import PageWriter

    Top = tuple[Module, "Top | None", float]


OTHER = PHASES.index("other")
RING = 32
"""Number of calls in `ThreadState.latest`; the same as in `hookd/native/entry.h`."""
_HERE = __file__.rpartition("target/")[0]
_TOOL = f"{_HERE}tool/"
_FORK = f"{_HERE}target/boot/fork.py"
graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)
"""Returns the number of the backward that the calling thread runs; -1 outside of one."""


class ThreadState:
    """The state of one thread that calls modules.

    Attributes:
        top: the stack of observed modules: `(module, top, number)` with the innermost module, the stack outside of it, and the
            module's id as stored in a cell; None outside of all modules.
        native: the thread's id in the kernel.
        base: address of its stack at the outermost call; `hookd/native/entry.c` compares it to find the depth.
        beat: index of its heartbeat's module cell in the page.
        busy: whether a plugin is running in it; modules that the plugin calls do not belong to the training.
        backwards: number of `torch.autograd.backward` that it is inside of (reentrant checkpointing nests them). Always at least
            1 in a thread of autograd's engine, which does nothing else.
        switching: number of `Module.train` that it is inside of.
        hidden: whether the code that runs in it is hidden from a profiler (`hookd.target.entry.hidden`).
        profiled: whether a profiler listened to its calls when the outermost call began.
        is_engine: whether it belongs to autograd's engine.
        outside: phase in which the outermost call was made; the thread returns to it after the call.
        inner: ns spent so far in timed calls and their backwards; nested ones are counted once.
        lost: ns spent so far in hookd's own hooks on the graph.
        recomputed: ns spent so far in recomputes.
        returned: outputs of the calls inside the outermost call, recorded if a plugin asks for them, until the next outermost
            call. Small outputs are kept alive during the outermost call.
        kept: number of elements in the outputs that are kept alive.
        latest: ring of the last `RING` calls that have returned a finite tensor: module, tensor and version of each, kept alive;
            None in unused places. In `returned` only the module stands for such a call.
        newest: index of the newest call in the ring.
        passing: references of `returned` that are ended in time, see `hookd.api.refs.Passing`.
        flows: whether to hook the graph in the outermost call, for plugins that listen to gradients.
        infers: whether the outermost call is inference (`hookd.target.events.inference`).
        in_eval: roots that were called in `eval()` since the last training call or backward, by `Module.id`.
        handed: modules of which the C entry has handed over a call inside the outermost call, because it could not look at the
            output.
        pending: calls that have not been handed over yet (`hookd.target.events.batching`).
        pending_size: number of elements in their outputs, plus the overhead of each call.
        spent: time that it has spent in each phase.
        passed: number of calls in all threads whose output nobody could look at, as of the beginning of the outermost call; -1
            if outputs were not looked at.
    """

    __slots__ = (
        "backwards",
        "base",
        "beat",
        "busy",
        "flows",
        "handed",
        "hidden",
        "in_eval",
        "infers",
        "inner",
        "is_engine",
        "kept",
        "latest",
        "lost",
        "native",
        "newest",
        "outside",
        "passed",
        "passing",
        "pending",
        "pending_size",
        "profiled",
        "recomputed",
        "returned",
        "spent",
        "switching",
        "top",
    )  # fmt: skip

    def __init__(self, native: int, beat: int, *, is_engine: bool) -> None:
        self.top: Top | None = None
        self.native = native
        self.beat = beat
        self.busy = self.hidden = self.profiled = self.flows = self.infers = False
        self.in_eval: set[int] = set()
        self.backwards = int(is_engine)
        self.switching = 0
        self.is_engine = is_engine
        self.outside = OTHER
        self.inner = self.lost = self.recomputed = self.base = 0
        self.returned: list[Call | Returned] = []
        self.latest: list[Any] = [None] * (3 * RING)
        self.newest = 0
        self.passing: list[Passing] = []
        self.kept = 0
        self.handed: set[Module] = set()
        self.pending: list[Call] = []
        self.pending_size = 0
        self.passed = -1
        self.spent = Spent()

    def stack(self) -> tuple[Module, ...]:
        """Return the observed modules that the thread is inside of, the outermost first."""
        modules = []
        top = self.top
        while top is not None:
            modules.append(top[0])
            top = top[1]
        return tuple(reversed(modules))


class Heartbeats:
    """The heartbeats of this process's threads, in the page."""

    def __init__(self, page: PageWriter) -> None:
        self._page = page
        self._bases: dict[int, int] = {}  # the heartbeat's first cell, by native id

    def begin(self, native: int, name: str) -> int:
        """Create the heartbeat of a thread, and return its first cell."""
        base = self._bases[native] = self._page.thread(native, name)
        return base

    def release_ended(self) -> None:
        """Release the heartbeats of threads that have ended."""
        with contextlib.suppress(OSError):  # they stay if there is no /proc in the container, or no descriptor left
            for native in set(self._bases) - living_threads():
                self._page.release_thread(self._bases.pop(native))


class Threads(Local):
    """The state of the calling thread, as `local.thread`.

    It is created at the thread's first access.

    Args:
        states: the `local.thread` of all threads, by ident.
    """

    def __init__(self, heartbeats: Heartbeats, states: dict[int, ThreadState]) -> None:
        # A thread-local object runs this once in each thread that accesses it.
        ident = thread.get_native_id()
        base = heartbeats.begin(ident, _name())
        known = (python.native_id for python in threading._active.copy().values())  # type: ignore[attr-defined]
        is_engine = graph_task() != -1 and ident not in known
        states[thread.get_ident()] = self.thread = ThreadState(ident, base + MODULE, is_engine=is_engine)


def living_threads() -> set[int]:
    """Return the kernel's ids of this process's threads.

    Raises:
        OSError: the container has no /proc, or no descriptor is left.
    """
    return set(map(int, posix.listdir("/proc/self/task")))


def is_inside(top: Top | None, module: Module) -> bool:
    """Whether a module is on a thread's stack of modules."""
    while top is not None:
        if top[0] is module:
            return True
        top = top[1]
    return False


def _name() -> str:
    # threading.current_thread() would leave a _DummyThread behind in a thread that Python did not start.
    if thread.get_ident() in OWN:
        return NAME
    known = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return known.name if known is not None else "thread"


def threads_inside() -> list[str]:
    """Return the idents of the threads with a frame of hookd's on their stack.

    This thread and hookd's own are left out. Frames of a daemon in this process (`hookd.testing`) do not count: they are
    not in a call of the training, and stay as long as the daemon. Nor do frames above a fork's handler, which waits for
    this agent and stores nothing.
    """
    inside = []
    with innermost_frames() as frames:
        for ident, frame in frames.items():
            if ident == thread.get_ident() or ident in OWN:
                continue
            is_inside = False
            top: Any = frame
            while top is not None:
                file = top.f_code.co_filename
                if file == _FORK:
                    is_inside = False
                elif is_ours(file) and not file.startswith(_TOOL):
                    is_inside = True
                top = top.f_back
            if is_inside:
                inside.append(str(ident))
    return inside


def is_ours(filename: str) -> bool:
    """Whether a code object's file is hookd's."""
    return filename.startswith((_HERE, "<hookd"))
