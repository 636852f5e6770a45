"""The C entry of `nn.Module.__call__`, which observes module calls without replacing the function.

`hookd/native/entry.c` describes how it works. `Entry` does what `ClassPatch` (`hookd/target/entry/patch.py`) does in Python.
`ClassPatch` is used if the entry is not possible: without a compiled entry for this machine, in a debug or free-threaded build
of Python, with torch before 2.1, or if something else has replaced or entered `__call__`.

CPython 3.11 bypasses the entry at a call that names the function and does not unpack arguments: at `super().__call__(x)`, but not
at `super().__call__(*args)`. A class whose own `__call__` does so is not observed there; `hookd_modules` counts it as bypassed.
"""

from __future__ import annotations

import ctypes
import sys
from enum import IntFlag
from functools import partial
from os import environ
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from hookd.api.events import Module
from hookd.api.hookspecs import TIMES
from hookd.api.totals import INFERENCE
from hookd.errors import AttachError
from hookd.target.boot import native
from hookd.target.entry import hidden
from hookd.target.entry.patch import HAS_COMPILED_IMPL, SKIP, is_pristine
from hookd.target.entry.threads import ThreadState
from hookd.target.events import backward, batching
from hookd.target.events.phases import STEP
from hookd.target.tensors import layout, torch_state
from hookd.target.tensors.kernel import DTYPES
from hookd.wire.page import CALL_RECORD

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.shown import Shown
    from hookd.api.totals import BackwardTotals, Totals
    from hookd.target.entry.plan import Plan
    from hookd.target.entry.threads import Threads
    from hookd.target.plugins.listeners import Listener
    from hookd.target.tensors.statistics import Numeric
    from hookd.wire.page import PageWriter

VERSION = 28
"""Required result of `hookd_entry_version`: the version of the interface to the C code."""
GROUPS = 256
"""Number of groups that entry.c can distinguish."""
RECURSION_RESERVE = 100
"""Recursion levels that hookd may need: with fewer left until Python's recursion limit, calls are not observed."""
_SIZE = FunctionType.__basicsize__
_SEARCHED_INTS = 32
"""Number of ints at the beginning of the interpreter's thread state that are searched for its depth.

The thread state has more than 200 bytes. Source: Include/cpython/pystate.h `_ts`, 3.10 to 3.14.
"""
_OF_THREAD = (
    "top", "busy", "backwards", "beat", "inner", "lost", "recomputed", "flows", "kept", "returned", "latest", "newest", "hidden",
    "base", "profiled", "infers",
)  # fmt: skip
"""Attributes of a `ThreadState` that entry.c reads and sets, in its order."""


_OF_NOTIFIER = ("notify", "notify_plainly", "no_frame", "versions")
"""Functions that notify.c calls (`hookd.target.plugins.notifier`)."""
_OF_GRAPHS = ("graph_begins", "graph_enters", "graph_ends", "graph_adds", "graph_notifies", "graph_failed")
"""Functions that graph.c calls (`hookd.target.entry.calls`)."""


class Gradients(IntFlag):
    """Flags for what listeners need of a module's gradients.

    The values are the same as in `hookd/native/entry.h`.

    Attributes:
        HEARS_BEFORE: a listener is called for the gradients that enter the module.
        HEARS: a listener is called for the gradients that leave the module.
        CHECKS_BEFORE: a listener is called for the gradients that enter it, unless all are finite.
        CHECKS: a listener is called for the gradients that leave it, unless all are finite.
        KEEPS_OUT: a listener takes the gradients that enter it.
        KEEPS_IN: a listener takes the gradients that leave it.
        TIMED: a listener takes the time.
        WALKS: a plugin listens to the gradients that leave it, so its nodes must be found.
        ADDS: the time is added up.
    """

    HEARS_BEFORE = 1
    HEARS = 2
    CHECKS_BEFORE = 4
    CHECKS = 8
    KEEPS_OUT = 16
    KEEPS_IN = 32
    TIMED = 64
    WALKS = 128
    ADDS = 256

    @classmethod
    def of(cls, listeners: list[Listener]) -> Gradients:
        """Return the flags for listeners to `backward_pre` and `backward`."""
        flags = cls(0)
        for listener in listeners:
            has_left = listener.hook == "backward"
            if listener.totals is not None:
                flags |= cls.ADDS
            elif listener.unless_finite:
                flags |= cls.KEEPS_OUT | (cls.CHECKS | cls.KEEPS_IN if has_left else cls.CHECKS_BEFORE)
            else:
                flags |= cls.HEARS if has_left else cls.HEARS_BEFORE
            if has_left:
                flags |= cls.WALKS
            if "grad_output" in listener.arguments:
                flags |= cls.KEEPS_OUT
            if "grad_input" in listener.arguments:
                flags |= cls.KEEPS_IN
            if not TIMES.isdisjoint(listener.arguments):
                flags |= cls.TIMED
        return flags


class CallValues(IntFlag):
    """Flags for the values that listeners take of a call.

    The module and its output are always there. The values are the same as in `hookd/native/entry.h`.
    """

    INPUTS = 1
    VERSIONS = 2
    TIMES = 4
    IS_NESTED = 8
    QUIET = 16

    @classmethod
    def of(cls, listeners: list[Listener]) -> CallValues:
        """Return the flags for listeners to calls."""
        names = {name for listener in listeners for name in listener.arguments}
        flags = cls(0)
        for flag, ours in (
            (cls.INPUTS, {"inputs", "kwargs"}),
            (cls.VERSIONS, {"versions"}),
            (cls.TIMES, TIMES),
            (cls.IS_NESTED, {"is_nested"}),
        ):
            if not names.isdisjoint(ours):
                flags |= flag
        return flags | cls.QUIET if any(listener.needs_quiet for listener in listeners) else flags


_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
_DTYPES = (*DTYPES, *_WHOLE)
"""The dtypes that kernel.c can look at, in its order, then those without infinity and NaN."""


class _Host(ctypes.Structure):
    """The objects that the C entry needs; the same as in entry.c."""

    _fields_ = (
        *((name, ctypes.py_object) for name in (
            "local", "unwind", "remember", "next_seq", "suspect", "shown", "hand", *_OF_NOTIFIER, "tensor", "parameter",
            "whole", "modes", "tracing", "unseen", "dispatching", "transforms", "autocast", "capturing", "compiler", "cuda",
            *_OF_GRAPHS, "hooked", "grad_enabled", "sequence", "will_run", "task", "queue", "carrier", "profile", "tool",
        )),
        ("dtypes", ctypes.py_object * len(_DTYPES)),
        *((name, ctypes.c_void_p) for name in ("gate", "largest", "summary", "digest")),
        ("level", ctypes.c_size_t),
        ("cells", ctypes.c_void_p),
        *((name, ctypes.c_size_t) for name in (
            "phase", "kind", "ring", "records", "most", "each", *_OF_THREAD, "waits",
        )),
    )  # fmt: skip


class Counted(NamedTuple):
    """The configuration for counting a module's calls; an attribute of the plan.

    Calls are counted unless the group uses plans (`Entry.use_plans`); the listeners to counted calls are called from C (`Entry.set_listeners`,
    `Entry.set_flow_listeners`). The entry reads the memory of `totals`, `backward` and `shown`, and does not keep them alive: the plan does.

    Attributes:
        group: number of the group; the modules of a group have the same listeners.
        remembers: whether outputs are recorded, as a plan does.
        checks: whether outputs are looked at, for listeners to `suspect`.
        is_timed: whether a listener takes the time of the calls, in this or in other steps. The time is needed in all steps,
            because it is deducted from the caller's own time.
        totals: totals to which the calls are added.
        backward: totals to which the backward passes are added.
        shown: objects that publish statistics of the outputs.
    """

    module: Module
    group: int
    remembers: bool
    checks: bool
    is_timed: bool
    totals: list[Totals]
    backward: list[BackwardTotals]
    shown: list[Shown]


class Plans(dict[int, Any]):
    """Plans by id(module), copied to the entry's own table.

    The table itself keeps them alive, because a signal handler may raise between any two lines here.
    """

    def __init__(self, library: Any) -> None:
        super().__init__()
        place = ctypes.c_size_t
        self._put: Callable[..., int] = native.function(library, "hookd_entry_put", place, ctypes.c_void_p)
        self._drop: Callable[..., int] = native.function(library, "hookd_entry_drop", place)
        self._clear: Callable[..., int] = native.function(library, "hookd_entry_clear")
        there, size, cells = ctypes.py_object, ctypes.c_size_t, ctypes.c_void_p
        self._count = native.function(
            library, "hookd_entry_count", place, there, there, size, *[ctypes.c_int] * 3, *[size] * 3, cells, cells
        )
        self._infer: Callable[..., int] = native.function(library, "hookd_entry_infer", place, size, cells)

    def __setitem__(self, key: int, plan: Any) -> None:
        if self._put(key, None if plan is SKIP else id(plan)):
            raise MemoryError
        super().__setitem__(key, plan)
        holder = getattr(plan, "__self__", None)
        counted: Counted | None = getattr(holder, "counted", None)
        if counted is not None:
            plan.__self__.counts_inference = False
            module, number = counted.module, float(counted.module.id)
            calls = [places for totals in counted.totals for places in totals.places_of(module)]
            back = [(places, totals.standing) for totals in counted.backward for places in totals.places_of(module)]
            shown = [place for published in counted.shown for place in (published.standing, published.place_of(module))]
            cells = [index for places in (*calls, *(places for places, _ in back)) for index in places]
            lasting = [array.buffer_info()[0] for array in (*(standing for _, standing in back), *shown)]
            kept = counted.remembers, counted.checks, counted.is_timed
            sizes = len(calls), len(back), len(counted.shown)
            arrays = (ctypes.c_int64 * len(cells))(*cells), (ctypes.c_void_p * len(lasting))(*lasting)
            if self._count(key, module, number, counted.group, *kept, *sizes, *arrays):
                raise MemoryError

    def count_inference(self, key: int, plan: Plan) -> None:
        """Count a module's calls of inference in C too, unless it has another plan by now. Until then, they go through the plan."""
        counted = plan.counted
        plan.counts_inference = True
        if counted is None or self.get(key) != plan.run:
            return
        calls = [places for totals in counted.totals for places in totals.places_of(counted.module, INFERENCE)]
        cells = [index for places in calls for index in places]
        if self._infer(key, len(calls), (ctypes.c_int64 * len(cells))(*cells)):
            raise MemoryError

    def pop(self, key: int, default: Any = None) -> Any:
        """Forget a module, and return its plan."""
        self._drop(key)
        return super().pop(key, default)

    def clear(self) -> None:
        """Forget all modules."""
        self._clear()
        super().clear()

    def close(self) -> None:
        """Forget all modules, and disconnect from the table: some of the modules may be freed later."""
        self.clear()
        self._put = self._drop = self._count = self._infer = self._clear = _ignore


class CannotEnterError(Exception):
    """Calls cannot be observed in C; the message is the reason."""


class Entry:
    """The C entry of `nn.Module.__call__`, until `restore`.

    Attributes:
        original: the function, which is not replaced.
        why_patched: "", because `nn.Module.__call__` is not replaced.
        hidden: calls a function of hookd's, with args and kwargs, hidden from a profiler (`hookd.target.entry.hidden`).
        use_plans: sets whether a group's calls go through their plans, or are counted.
        check: sets whether `Portions.suspect` is called for outputs of counted calls that are not finite, and whether for all
            others as well; returns the number of outputs since the last time that could not be looked at.
        hand: sets whether large outputs of a group are checked as well, and passed to Python where C cannot check them.
        meter: sets whether the time of counted calls is measured.
        let_go: keeps only the last recorded calls of a thread, with weak references; returns how many records are left as
            they are.
        too_deep: returns the number of calls that were too deep to be observed, since the last time.
    """

    why_patched = ""

    def __init__(self, library: Any, call: FunctionType, missing: Callable[..., Any]) -> None:
        self.original: Any = call
        self._whole: Any = FunctionType(
            call.__code__, call.__globals__, call.__name__, call.__defaults__, call.__closure__
        )
        self.plans = Plans(library)
        self._library = library
        self._found: list[layout.Layout | None] = []
        there, size = ctypes.py_object, ctypes.c_size_t
        self._watch = native.function(library, "hookd_entry_watch", there, size)
        self._unwatch = native.function(library, "hookd_entry_unwatch", there, size)
        self.use_plans: Callable[[int, bool], int] = native.function(
            library, "hookd_entry_use_plans", size, ctypes.c_int
        )
        self._set_listeners = native.function(library, "hookd_entry_listen_calls", size, there, there, ctypes.c_int)
        made = {function.__name__: function for function in native.objects(library, "hookd_entry_methods")}
        self.check: Callable[[bool, bool], int] = made["check"]
        self.let_go: Callable[[ThreadState, int], int] = made["let_go"]
        self.meter: Callable[[bool], None] = made["meter"]
        self._largest, self._number, self._digest = made["largest"], made["number"], made["digest"]
        self._quiet, self._leave = made["quiet"], made["leave"]
        self._next_ordinal, self._close_spans, self._since_span = (
            made["next_ordinal"],
            made["close_spans"],
            made["since_span"],
        )
        self._walk = made["walk"]
        self.hand: Callable[[int, bool], int] = native.function(library, "hookd_entry_hand", size, ctypes.c_int)
        self._spent = native.function(library, "hookd_entry_spent", ctypes.c_void_p)
        self._set_flow_listeners = native.function(library, "hookd_entry_listen_flows", size, there, ctypes.c_int)
        self._look = native.function(library, "hookd_entry_look", ctypes.c_void_p, size)
        self._set_depth = native.function(library, "hookd_entry_depth", size, *[ctypes.c_int] * 3)
        self.too_deep: Callable[[], int] = native.function(library, "hookd_entry_deep")
        self.hidden = native.caller(library, "hookd_entry_hidden")
        self._call_visibly = native.caller(library, "hookd_entry_call_visibly")
        self._set_host = native.function(library, "hookd_entry_host", ctypes.c_void_p)
        self._set_layout = native.function(library, "hookd_entry_layout", ctypes.c_void_p)
        start = native.function(library, "hookd_entry_start", there, there, there)
        if start(call, _plain, missing):
            raise CannotEnterError("another tool has entered nn.Module.__call__")

    @classmethod
    def load(cls, missing: Callable[..., Any]) -> Entry:
        """Return an entry that is not installed yet.

        Args:
            missing: called as `missing(module, args, kwargs)` for a module without a plan.

        Raises:
            CannotEnterError: the entry is not possible in this process.
        """
        call = nn.Module.__dict__["__call__"]
        if environ.get("HOOKD_ENTRY") == "0":
            raise CannotEnterError("HOOKD_ENTRY=0 is in its environment")
        # A plan must not call the function that is entered. Before torch 2.1 that would be `_call_impl`; otherwise it may be
        # another tool's function.
        if not HAS_COMPILED_IMPL:
            raise CannotEnterError("torch is older than 2.1")
        if not is_pristine(call):
            raise CannotEnterError("another tool has replaced nn.Module.__call__")
        if not _has_usual_layout():
            raise CannotEnterError("this is a debug or free-threaded build of Python")
        try:
            image = native.image_of("entry")
        except OSError:
            raise CannotEnterError("there was no C compiler when hookd was installed") from None
        try:
            library = native.load("hookd-entry", image, keeps_lock=True)
            if native.function(library, "hookd_entry_version")() != VERSION:
                raise CannotEnterError("the compiled entry belongs to another version of hookd: reinstall hookd")
            return cls(library, call, missing)
        except (OSError, AttributeError) as error:  # no memory file, not executable, for another machine, not an entry
            raise CannotEnterError(str(error)) from None

    def install(self) -> None:
        """Make Python run hookd's C function when it calls `__call__`.

        Raises:
            AttachError: another tool has put a function of its own there since `load`.
        """
        if self._watch(self.original, _SIZE):
            raise AttachError(
                "another tool has entered nn.Module.__call__ during the attach", reason="busy", hint="Try again."
            )

    def leave_room(self) -> None:
        """Stop observing calls that are too near the recursion limit.

        This finds the depth in the interpreter's thread state: the one number that changes with each level.
        """
        shallow, deep, deeper = (self._numbers_at(levels) for levels in (0, 5, 12))
        for sign in (-1, 1):
            steps = 5 * sign, 12 * sign
            indices = [at for at, n in enumerate(shallow) if (deep[at] - n, deeper[at] - n) == steps]
            if len(indices) == 1:
                self._set_depth(4 * indices[0], sign > 0, sys.getrecursionlimit(), RECURSION_RESERVE)

    def _numbers_at(self, levels: int) -> list[int]:
        """Return the first numbers of the thread state, some levels further down."""
        if levels:
            return self._numbers_at(levels - 1)
        numbers = (ctypes.c_int * _SEARCHED_INTS)()
        self._look(numbers, _SEARCHED_INTS)
        return list(numbers)

    def find_layout(self) -> layout.Layout | None:
        """Return the memory layout of torch's tensors, None if unknown. The first call takes some milliseconds."""
        if not self._found:
            self._found.append(layout.find(_DTYPES))
        return self._found[0]

    def start_counting(
        self,
        names: dict[str, Any],
        *,
        local: Threads,
        page: PageWriter,
        numeric: Numeric,
        remember: Callable[..., None],
        suspect: Callable[..., None],
        shown: Callable[..., None],
        hand: Callable[..., None],
    ) -> None:
        """Count calls in C from now on.

        If objects do not have the usual memory layout, plans count.

        Args:
            names: functions of `hookd.target.entry.calls`, by name.
            local: the state of the calling thread.
            page: the page in which calls are counted.
            numeric: provides the kernel that looks at outputs.
            remember: called for a call that the entry cannot record.
            suspect: called for a call whose output is not finite.
            shown: called for a call whose output statistics cannot be published in C.
            hand: called for a call whose output C cannot look at.
        """
        state = ThreadState(0, 0, is_engine=False)
        module = Module("", "", 0, 0, None, leaf=True)
        offsets = [_offset(state, name) for name in _OF_THREAD] + [_offset(module, "_waits")]
        if None in offsets or not hasattr(torch._C, "_len_torch_function_stack"):
            return
        dtypes: Any = (ctypes.py_object * len(_DTYPES))(*_DTYPES)  # type: ignore[misc]  # typeshed wants them wrapped
        # Only the address: a reference would keep the page from being closed.
        cells = ctypes.addressof(ctypes.c_char.from_buffer(page.cells))
        host = _Host(
            local, names["unwind"], remember, page.next_seq, suspect, shown, hand, *(names[name] for name in _OF_NOTIFIER),
            torch.Tensor, nn.Parameter, self._whole, torch_state.function_modes, torch_state.tracing, torch_state.unseen,
            *torch_state.USUAL, *(names[name] for name in _OF_GRAPHS),
            hidden.hooked(self._library), torch.is_grad_enabled, backward.next_sequence, backward.will_run, *_for_probes(), hidden.profile, hidden.tool, dtypes,
            *numeric.addresses(), cells, STEP, CALL_RECORD, *page.recorder, batching.KEPT, batching.LIGHT, *offsets,
        )  # fmt: skip
        self._set_host(ctypes.byref(host))
        torch_state.quiet, torch_state.leave = self._quiet, self._leave
        backward.spans = backward.Spans(self._next_ordinal, self._close_spans, self._since_span)
        backward.walk_in_c = self._walk
        found = self.find_layout() if host.gate else None
        if found is not None:
            self._set_layout(ctypes.byref(found))
            numeric.at_once = self._largest
            numeric.number_at_once = self._number
            numeric.digest_at_once = self._digest

    def set_listeners(self, group: int, listeners: list[Listener]) -> None:
        """Set the observers of `forward_pre` and `forward`, in calling order, for the counted calls of a group."""
        before = [listener for listener in listeners if listener.hook == "forward_pre"]
        after = [listener for listener in listeners if listener.hook != "forward_pre"]
        self._set_listeners(group, before if listeners else None, after, CallValues.of(listeners))

    def set_flow_listeners(self, group: int, listeners: list[Listener] | None) -> None:
        """Set the observers of gradients for a group's counted calls; None: none. The list must not change later."""
        called = None if listeners is None else [listener for listener in listeners if listener.totals is None]
        self._set_flow_listeners(group, called, Gradients.of(listeners or []))

    def metered_ns(self) -> list[int]:
        """Return four times in ns, spent in C since the last call: on counted calls, graph hooks, shown outputs, large outputs."""
        spent = (ctypes.c_int64 * 4)()
        self._spent(spent)
        return list(spent)

    def call_visibly(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the training from hidden code, visible to profilers."""
        return self._call_visibly(function, args, kwargs)

    def visible_call(self, module: Any) -> Callable[..., Any]:
        """Return a function that runs a module without hookd; `torch.profiler` recognizes a module's call by its code."""
        return partial(self.call_visibly, self._whole, module)

    def register(self) -> None:
        """No-op: torch.compile reads the code of a function, never its entry."""

    def restore(self) -> str:
        """Restore the function's own entry; return a message if that is impossible, because another tool has replaced hookd's, else ""."""
        is_foreign = self._unwatch(self.original, _SIZE)
        message = "nn.Module.__call__: another tool has entered it after hookd; hookd's entry stays and calls through"
        return message if is_foreign else ""

    def close(self) -> None:
        """Free all memory; the code stays loaded while a call that began in it runs, or a graph has its hooks."""
        self.plans.close()
        torch_state.quiet, torch_state.leave = torch_state.ask, torch_state.leave_in_python
        backward.spans, backward.walk_in_c = backward.NO_SPANS, backward.no_walk
        stop = native.function(self._library, "hookd_entry_stop", ctypes.c_void_p)
        if not stop(self._library._handle):
            native.unload(self._library)


def _for_probes() -> tuple[Any, Any, Any]:
    """Return two functions of torch and a tensor for `hookd/native/spans.c`. Nones if torch lacks the functions."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    queue = getattr(torch.autograd.Variable._execution_engine, "queue_callback", None)
    if None in (task, queue) or not hasattr(torch._C._FunctionBase, "_register_hook_dict"):
        return None, None, None
    with torch_state.unseen(), torch._C._DisableTorchDispatch():
        return task, queue, torch.empty(0, dtype=torch.float32, device="cpu")


def _has_usual_layout() -> bool:
    """Whether Python objects begin as the C code expects: this is neither a trace-refs nor a free-threaded build."""
    return sys.version_info >= (3, 10) and not hasattr(sys, "getobjects") and "t" not in getattr(sys, "abiflags", "")


def _offset(instance: Any, name: str) -> int | None:
    """Return the offset of one of an object's `__slots__`, in bytes, or None if it cannot be found."""
    sentinel, before = object(), getattr(instance, name)
    setattr(instance, name, sentinel)
    words = (ctypes.c_size_t * (type(instance).__basicsize__ // 8)).from_address(id(instance))
    offsets = [8 * at for at, word in enumerate(words) if word == id(sentinel)]
    setattr(instance, name, before)
    return offsets[0] if len(offsets) == 1 else None


def _plain() -> None:
    """An ordinary function: its entry is the one that all Python functions have."""


def _ignore(*_: object) -> int:
    return 0
