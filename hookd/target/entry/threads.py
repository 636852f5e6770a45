"""What the agent knows of each thread that calls modules: its stack of modules and its heartbeat. Runs in the target."""

from __future__ import annotations

import contextlib
import posix
import threading
from typing import TYPE_CHECKING, Any

import torch

from hookd.target.boot.spawn import NAME, OWN
from hookd.target.events.phases import Spent
from hookd.wire.frames import held
from hookd.wire.originals import Local, thread
from hookd.wire.page import MODULE, PHASES

if TYPE_CHECKING:
    from hookd.api.events import Call, Module, Returned
    from hookd.api.refs import Passing
    from hookd.wire.page import PageWriter

    Top = tuple[Module, "Top | None", float]


OTHER = PHASES.index("other")
RING = 32
"""As `hookd/native/entry.h` has it."""
_HERE = __file__.rpartition("target/")[0]
_DAEMON = f"{_HERE}tool/"
_FORK = f"{_HERE}target/boot/fork.py"
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)


class ThreadState:
    """One thread that calls modules.

    Attributes:
        top: the observed module it is inside of, what it was inside of before that, and the module's id as a cell has
            it: `(module, top, number)`; None outside.
        native: its id in the kernel.
        base: where its stack was at the outermost call, as an address: `hookd/native/entry.c` looks how far down it has come.
        beat: index of its heartbeat's module cell in the page.
        busy: a plugin is running in it; modules that the plugin calls are none of the training's.
        backwards: not 0 while it is inside a backward: how many `torch.autograd.backward` (reentrant checkpointing
            nests them), and 1 for ever in a thread of autograd's own, which does nothing else.
        switching: how many `Module.train` it is inside of.
        hidden: what runs in it is hidden from a profiler (`hookd.target.entry.hidden`).
        profiled: a profiler listened to its calls when the outermost one began.
        is_engine: it is one of autograd's own.
        outside: the phase in which the outermost call was made, to go back to.
        inner: ns spent so far in calls, and backwards of calls, that are timed; what was inside one is counted once.
        lost: ns that hookd's own hooks on the graph have taken so far.
        again: ns spent so far in recomputes.
        returned: what the calls inside the outermost one have returned, until the next outermost one, where somebody asks;
            inside of it small outputs are kept alive.
        kept: elements in those.
        latest: of the last `RING` calls that have returned a finite tensor, which stand in `returned` as the module alone, three places
            each: the module, the tensor and its version, kept alive; None where there is none. `newest` says which is the last one.
        flows: the graph is to be hooked for whoever listens to gradients in the outermost call.
        handed: of which modules the entry in C has handed a call over in the outermost one, for it could not look at what that has returned.
        held: those calls that have not been handed over yet (`hookd.target.events.batching`).
        held_size: elements in their outputs.
        spent: what it has spent in which phase.
        passed: how many calls of all threads had returned what nobody could look at when the outermost one began; -1: nobody looked.
    """

    __slots__ = (
        "again", "backwards", "base", "beat", "busy", "flows", "handed", "held", "held_size", "hidden", "inner", "is_engine", "kept", "latest", "lost", "native", "newest", "outside", "passed", "passing", "profiled", "returned", "spent", "switching", "top",
    )  # fmt: skip

    def __init__(self, native: int, beat: int, *, is_engine: bool) -> None:
        self.top: Top | None = None
        self.native = native
        self.beat = beat
        self.busy = self.hidden = self.profiled = self.flows = False
        self.backwards = int(is_engine)
        self.switching = 0
        self.is_engine = is_engine
        self.outside = OTHER
        self.inner = self.lost = self.again = self.base = 0
        self.returned: list[Call | Returned] = []
        self.latest: list[Any] = [None] * (3 * RING)
        self.newest = 0
        self.passing: list[Passing] = []  # of what is in `returned`, the references that end in time
        self.kept = 0
        self.handed: set[Module] = set()
        self.held: list[Call] = []
        self.held_size = 0
        self.passed = -1
        self.spent = Spent()

    def stack(self) -> tuple[Module, ...]:
        """Give the observed modules that it is inside of, the outermost first."""
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
        self._bases: dict[int, int] = {}  # by native id: the heartbeat's first cell

    def begin(self, native: int, name: str) -> int:
        """Give a thread a heartbeat, and return its first cell."""
        base = self._bases[native] = self._page.thread(native, name)
        return base

    def release_ended(self) -> None:
        """Release the heartbeats of threads that have ended."""
        with contextlib.suppress(OSError):  # in a container without /proc, and while no descriptor is left, they stay
            alive = {int(task) for task in posix.listdir("/proc/self/task")}
            for native in set(self._bases) - alive:
                self._page.release_thread(self._bases.pop(native))


class Threads(Local):
    """The state of the calling thread as `local.thread`, made when the thread is first seen.

    Args:
        heartbeats: shared by all threads.
        states: shared by all threads: what is `local.thread` in each, by its ident.
    """

    def __init__(self, heartbeats: Heartbeats, states: dict[int, ThreadState]) -> None:
        # It runs this once in every thread that touches the object.
        ident = thread.get_native_id()
        base = heartbeats.begin(ident, _name())
        states[thread.get_ident()] = self.thread = ThreadState(
            ident, base + MODULE, is_engine=_graph_task() != -1 and ident not in _python_threads()
        )


def is_inside(top: Top | None, module: Module) -> bool:
    """Whether a module is on a thread's stack of modules."""
    while top is not None:
        if top[0] is module:
            return True
        top = top[1]
    return False


def _python_threads() -> set[int | None]:
    return {thread.native_id for thread in threading._active.copy().values()}  # type: ignore[attr-defined]


def _name() -> str:
    # threading.current_thread() would leave a _DummyThread behind in a thread that Python did not start.
    if thread.get_ident() in OWN:
        return NAME
    known = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return known.name if known is not None else "thread"


def frames_inside() -> list[str]:
    """Name the threads that have a frame of ours on their stack, other than this one and hookd's own.

    Those of a daemon in this process (`hookd.testing`) are in nobody's call, and stay as long as it does. What a fork has
    called waits for us, and stores nothing.
    """
    inside = []
    with held() as frames:
        for ident, frame in frames.items():
            if ident == thread.get_ident() or ident in OWN:
                continue
            is_inside = False
            top: Any = frame
            while top is not None:
                file = top.f_code.co_filename
                if file == _FORK:
                    is_inside = False
                elif is_ours(file) and not file.startswith(_DAEMON):
                    is_inside = True
                top = top.f_back
            if is_inside:
                inside.append(str(ident))
    return inside


def is_ours(filename: str) -> bool:
    """Whether a code object's file is hookd's."""
    return filename.startswith((_HERE, "<hookd"))
