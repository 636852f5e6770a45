"""The entry of `nn.Module.__call__`: watch module calls without replacing the function. Runs in the target.

`hookd/native/entry.c` says how. `Entry` does what `ClassPatch` (`hookd/target/entry/patch.py`) does in Python, which is used where
the entry cannot be: no compiled entry for this machine, a debug or free-threaded build of Python, torch before 2.1, or a
`__call__` that somebody else has replaced or entered.

CPython 3.11 does not ask the entry at a call that names the function and packs no arguments: `super().__call__(x)`, but not
`super().__call__(*args)`. A class with such a `__call__` of its own is not observed there; `hookd_modules` says bypassed.
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
from hookd.errors import AttachError
from hookd.target.boot import native
from hookd.target.entry import hidden
from hookd.target.entry.patch import HAS_COMPILED_IMPL, SKIP, is_pristine
from hookd.target.entry.threads import ThreadState
from hookd.target.events import backward, batching
from hookd.target.tensors import layout, torch_state
from hookd.target.tensors.kernel import DTYPES
from hookd.wire.page import CALL_RECORD, MODULE, STEP

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.shown import Shown
    from hookd.api.totals import BackwardTotals, Totals
    from hookd.target.entry.threads import Threads
    from hookd.target.plugins.listeners import Listener
    from hookd.target.tensors.statistics import Numeric
    from hookd.wire.page import PageWriter

VERSION = 22
"""What `hookd_entry_version` of an entry returns that is called as below."""
SHAPES = 256
"""So many shapes entry.c can tell apart."""
ROOM = 100
"""So many levels of calls are left to hookd: where fewer are left until Python's recursion limit, calls are not observed."""
_SIZE = FunctionType.__basicsize__
_LOOKED_AT = 32
"""So many numbers at the beginning of a thread's state in the interpreter, among which its depth is; it has more than 200 bytes.
Source: Include/cpython/pystate.h `_ts`, 3.10 to 3.14."""
_OF_THREAD = (
    "top",
    "busy",
    "backwards",
    "beat",
    "inner",
    "lost",
    "again",
    "flows",
    "kept",
    "returned",
    "latest",
    "newest",
    "hidden",
    "base",
    "profiled",
)
"""What entry.c reads and sets of a `ThreadState`, in the order that it knows."""


_OF_TELLING = ("tell", "tell_plainly", "no_frame", "versions")
"""What told.c calls (`hookd.target.plugins.telling`)."""
_OF_GRAPHS = ("graph_begins", "graph_enters", "graph_ends", "graph_adds", "graph_told", "graph_failed")
"""What graph.c calls (`hookd.target.entry.calls`)."""


class Gradients(IntFlag):
    """What is wanted of the gradients of a module, as `hookd/native/entry.h` has it.

    Attributes:
        HEARS_BEFORE: somebody is told of those that enter it.
        HEARS: of those that leave it.
        CHECKS_BEFORE: somebody is told of those that enter it, unless all are finite.
        CHECKS: likewise of those that leave it.
        KEEPS_OUT: somebody looks at those that enter it.
        KEEPS_IN: at those that leave it.
        TIMED: somebody wants the time.
        WALKS: anybody listens to those that leave it, for which its nodes must be found.
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
    def of(cls, heard: list[Listener]) -> Gradients:
        """Find what listeners to `backward_pre` and `backward` want."""
        wanted = cls(0)
        for one in heard:
            has_left = one.hook == "backward"
            if one.totals is not None:
                wanted |= cls.ADDS
            elif one.unless_finite:
                wanted |= cls.KEEPS_OUT | (cls.CHECKS | cls.KEEPS_IN if has_left else cls.CHECKS_BEFORE)
            else:
                wanted |= cls.HEARS if has_left else cls.HEARS_BEFORE
            if has_left:
                wanted |= cls.WALKS
            if "grad_output" in one.arguments:
                wanted |= cls.KEEPS_OUT
            if "grad_input" in one.arguments:
                wanted |= cls.KEEPS_IN
            if not TIMES.isdisjoint(one.arguments):
                wanted |= cls.TIMED
        return wanted


class Wanted(IntFlag):
    """What is wanted of the calls of a module beside itself and its output, as `hookd/native/entry.h` has it."""

    INPUTS = 1
    VERSIONS = 2
    TIMES = 4
    IS_AGAIN = 8
    QUIET = 16

    @classmethod
    def of(cls, heard: list[Listener]) -> Wanted:
        """Find what listeners to calls want."""
        names = {name for one in heard for name in one.arguments}
        wanted = cls(0)
        for flag, ours in (
            (cls.INPUTS, {"inputs", "kwargs"}),
            (cls.VERSIONS, {"versions"}),
            (cls.TIMES, TIMES),
            (cls.IS_AGAIN, {"is_again"}),
        ):
            if not names.isdisjoint(ours):
                wanted |= flag
        return wanted | cls.QUIET if any(one.needs_quiet for one in heard) else wanted


_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
_DTYPES = (*DTYPES, *_WHOLE)
"""What kernel.c can look at, in its order, and what has neither infinity nor NaN."""


class _Host(ctypes.Structure):
    """What calls are counted with, as entry.c has it."""

    _fields_ = (
        *(
            (name, ctypes.py_object)
            for name in ("local", "unwind", "remember", "next_seq", "suspect", "shown", "hand", *_OF_TELLING)
        ),
        *((name, ctypes.py_object) for name in ("tensor", "parameter", "whole", "modes", "tracing", "unseen")),
        *(
            (name, ctypes.py_object)
            for name in ("dispatching", "transforms", "autocast", "capturing", "compiler", "cuda")
        ),
        *((name, ctypes.py_object) for name in _OF_GRAPHS),
        *((name, ctypes.py_object) for name in ("hooked", "grad_enabled", "sequence", "will_run")),
        *((name, ctypes.py_object) for name in ("task", "queue", "carrier", "profile", "tool")),
        ("dtypes", ctypes.py_object * len(_DTYPES)),
        ("gate", ctypes.c_void_p),
        ("largest", ctypes.c_void_p),
        ("summary", ctypes.c_void_p),
        ("level", ctypes.c_size_t),
        ("cells", ctypes.c_void_p),
        *((name, ctypes.c_size_t) for name in ("phase", "kind", "ring", "records", "most", "each")),
        *((name, ctypes.c_size_t) for name in (*_OF_THREAD, "waits")),
    )


class Counted(NamedTuple):
    """What the entry counts of a module, where no Python function listens to its calls: an attribute of its plan.

    Attributes:
        shape: all modules of one have the same listeners.
        remembers: whether what a call returns is kept, as a plan does.
        checks: whether it is looked at, for who listens to `suspect`.
        is_timed: whether anybody wants the time of its calls, now or in other steps: who called it is told its own time without this one.
        totals: to which they are added, `backward`, to which the backward passes are, and `shown`, by which statistics of what they
            return are shown: the entry keeps none of them alive.
    """

    module: Module
    shape: int
    remembers: bool
    checks: bool
    is_timed: bool
    totals: list[Totals]
    backward: list[BackwardTotals]
    shown: list[Shown]


class Plans(dict[int, Any]):
    """Plans by id(module), which the entry looks up in a table of its own.

    The table keeps them alive itself: a signal handler may raise between any two lines here.
    """

    def __init__(self, library: Any) -> None:
        super().__init__()
        place = ctypes.c_size_t
        self._put: Callable[..., int] = native.function(library, "hookd_entry_put", place, ctypes.c_void_p)
        self._drop: Callable[..., int] = native.function(library, "hookd_entry_drop", place)
        self._clear: Callable[..., int] = native.function(library, "hookd_entry_clear")
        there, size, cells = ctypes.py_object, ctypes.c_size_t, ctypes.c_void_p
        self._count = native.function(
            library,
            "hookd_entry_count",
            place,
            there,
            there,
            size,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            size,
            size,
            size,
            cells,
            cells,
        )

    def __setitem__(self, key: int, plan: Any) -> None:
        if self._put(key, None if plan is SKIP else id(plan)):
            raise MemoryError
        super().__setitem__(key, plan)
        counted: Counted | None = getattr(getattr(plan, "__self__", None), "counted", None)
        if counted is not None:
            module, number = counted.module, float(counted.module.id)
            calls = [places for totals in counted.totals for places in totals.places_of(module)]
            back = [(places, totals.standing) for totals in counted.backward for places in totals.places_of(module)]
            shown = [place for one in counted.shown for place in (one.standing, one.place_of(module))]
            cells = [index for places in (*calls, *(places for places, _ in back)) for index in places]
            lasting = [one.buffer_info()[0] for one in (*(standing for _, standing in back), *shown)]
            kept, sizes = (
                (counted.remembers, counted.checks, counted.is_timed),
                (len(calls), len(back), len(counted.shown)),
            )
            arrays = (ctypes.c_int64 * len(cells))(*cells), (ctypes.c_void_p * len(lasting))(*lasting)
            if self._count(key, module, number, counted.shape, *kept, *sizes, *arrays):
                raise MemoryError

    def pop(self, key: int, default: Any = None) -> Any:
        """Forget a module; return its plan."""
        self._drop(key)
        return super().pop(key, default)

    def clear(self) -> None:
        """Forget all modules."""
        self._clear()
        super().clear()

    def close(self) -> None:
        """Forget all modules, and the table: some of the modules may die later."""
        self.clear()
        self._put = self._drop = self._count = self._clear = _ignore


class CannotEnterError(Exception):
    """Calls cannot be entered in C; the text says why."""


class Entry:
    """`nn.Module.__call__` entered in C, and given back its own entry.

    Attributes:
        original: the function, which stays what it is.
        plans: by id(module).
        why_patched: "": `nn.Module.__call__` is not replaced.
        hidden: calls a function of hookd's, with args and kwargs, hidden from a profiler (`hookd.target.entry.hidden`).
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
        self._arm = native.function(library, "hookd_entry_arm", size, ctypes.c_int)
        self._tell = native.function(library, "hookd_entry_tell", size, there, there, ctypes.c_int)
        made = {one.__name__: one for one in native.objects(library, "hookd_entry_methods")}
        self._check, self._meter, self._let_go = made["check"], made["meter"], made["let_go"]
        self._largest, self._number = made["largest"], made["number"]
        self._quiet, self._leave = made["quiet"], made["leave"]
        self._turn, self._close_marks, self._since_mark = made["turn"], made["close_marks"], made["since_mark"]
        self._walk = made["walk"]
        self._hand = native.function(library, "hookd_entry_hand", size, ctypes.c_int)
        self._spent = native.function(library, "hookd_entry_spent", ctypes.c_void_p)
        self._hear = native.function(library, "hookd_entry_hear", size, there, ctypes.c_int)
        self._look = native.function(library, "hookd_entry_look", ctypes.c_void_p, size)
        self._set_depth = native.function(library, "hookd_entry_depth", size, *[ctypes.c_int] * 3)
        self._deep = native.function(library, "hookd_entry_deep")
        self.hidden = native.caller(library, "hookd_entry_hidden")
        self._aloud = native.caller(library, "hookd_entry_aloud")
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
            CannotEnterError: there is none for this process.
        """
        call = nn.Module.__dict__["__call__"]
        if environ.get("HOOKD_ENTRY") == "0":
            raise CannotEnterError("HOOKD_ENTRY=0 is in its environment")
        # What a plan calls on must not be what is entered: before torch 2.1 that is `_call_impl`, else another tool's function.
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
                raise CannotEnterError("the entry is of another version of hookd: install hookd anew")
            return cls(library, call, missing)
        except (OSError, AttributeError) as error:  # no memory file, not executable, another machine's, no entry at all
            raise CannotEnterError(str(error)) from None

    def install(self) -> None:
        """Enter the function.

        Raises:
            AttachError: somebody else has done so since `load`.
        """
        if self._watch(self.original, _SIZE):
            raise AttachError(
                "another tool has entered nn.Module.__call__ at this moment", reason="busy", hint="Try again."
            )

    def leave_room(self, room: int = ROOM) -> None:
        """Let calls pass unobserved where fewer levels are left until the recursion limit, from now on."""
        shallow, deep, deeper = (self._numbers_at(levels) for levels in (0, 5, 12))
        for sign in (-1, 1):
            found = [
                index
                for index, number in enumerate(shallow)
                if (deep[index] - number, deeper[index] - number) == (5 * sign, 12 * sign)
            ]
            if len(found) == 1:
                self._set_depth(4 * found[0], sign > 0, sys.getrecursionlimit(), room)

    def _numbers_at(self, levels: int) -> list[int]:
        """Look at the thread's state from so many levels further down."""
        if levels:
            return self._numbers_at(levels - 1)
        numbers = (ctypes.c_int * _LOOKED_AT)()
        self._look(numbers, _LOOKED_AT)
        return list(numbers)

    def too_deep(self) -> int:
        """Return how many calls have passed unobserved for want of room since the last time."""
        return int(self._deep())

    def find_layout(self) -> layout.Layout | None:
        """Look where torch has what of a tensor, which takes some milliseconds the first time; None: nobody can tell."""
        if not self._found:
            self._found.append(layout.find(_DTYPES))
        return self._found[0]

    def host(
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
        """Count calls in C from now on; where objects are not laid out as usual, plans count.

        Args:
            names: of functions of `hookd.target.entry.calls`.
            local: has the calling thread's state.
            page: in which calls are counted.
            numeric: has the kernel that looks at outputs.
            remember: is called for a call that the entry cannot remember,
            suspect: for one whose output is not finite,
            shown: for one whose output is to be shown and cannot be in C,
            hand: and for one whose output cannot be looked at there.
        """
        state = ThreadState(0, 0, is_engine=False)
        module = Module("", "", 0, 0, None, leaf=True)
        offsets = [_offset(state, name) for name in _OF_THREAD] + [_offset(module, "_waits")]
        if None in offsets or not hasattr(torch._C, "_len_torch_function_stack"):
            return
        dtypes: Any = (ctypes.py_object * len(_DTYPES))(*_DTYPES)  # type: ignore[misc]  # typeshed wants them wrapped
        cells = ctypes.addressof(ctypes.c_char.from_buffer(page.cells))  # no reference stays: a page is to be closed
        host = _Host(
            local, names["unwind"], remember, page.next_seq, suspect, shown, hand, *(names[name] for name in _OF_TELLING),
            torch.Tensor, nn.Parameter, self._whole, torch_state.function_modes, torch_state.tracing, torch_state.unseen,
            *torch_state.USUAL, *(names[name] for name in _OF_GRAPHS),
            hidden.hooked(self._library), torch.is_grad_enabled, backward.next_sequence, backward.will_run, *_for_marks(), hidden.profile, hidden.tool, dtypes,
            *numeric.addresses(), cells, STEP - MODULE, CALL_RECORD, *page.recorder, batching.KEPT, batching.LIGHT, *offsets,
        )  # fmt: skip
        self._set_host(ctypes.byref(host))
        torch_state.quiet, torch_state.leave = self._quiet, self._leave
        backward.marks = backward.Marks(self._turn, self._close_marks, self._since_mark)
        backward.walk_in_c = self._walk
        found = self.find_layout() if host.gate else None
        if found is not None:
            self._set_layout(ctypes.byref(found))
            numeric.at_once = self._largest
            numeric.number_at_once = self._number

    def arm(self, shape: int, *, is_armed: bool) -> None:
        """Have the calls of a shape go through the plans, or count them."""
        self._arm(shape, is_armed)

    def tell(self, shape: int, heard: list[Listener]) -> None:
        """Tell these listeners of the calls of a shape that are counted (`hookd.target.plugins.telling`).

        Args:
            shape: of the modules.
            heard: observers of `forward_pre` and `forward` that are switched on, in the order of calling.
        """
        before = [one for one in heard if one.hook == "forward_pre"]
        after = [one for one in heard if one.hook != "forward_pre"]
        self._tell(shape, before if heard else None, after, Wanted.of(heard))

    def hear(self, shape: int, heard: list[Listener] | None) -> None:
        """Hook the graph for the calls of a shape that are counted, for these listeners to gradients; None: do not.

        Args:
            shape: of the modules.
            heard: observers that are switched on; a list that nobody changes.
        """
        told = None if heard is None else [one for one in heard if one.totals is None]
        self._hear(shape, told, Gradients.of(heard or []))

    def check(self, *, checks: bool, alert: bool) -> int:
        """Look at what counted calls return, or do not; return how many have passed since the last time that nobody could look at.

        Args:
            checks: have `Portions.suspect` told of what is not finite;
            alert: and of all others.
        """
        passed: int = self._check(checks, alert)
        return passed

    def hand(self, shape: int, *, hands: bool) -> None:
        """Look at large outputs of a shape as well, and hand over what cannot be looked at in C; or do not."""
        self._hand(shape, hands)

    def meter(self, *, is_metered: bool) -> None:
        """Take the time of what is counted, or do not."""
        self._meter(is_metered)

    def let_go(self, thread: ThreadState, last: int) -> int:
        """Know of the calls that were remembered only the last ones still, weakly; return how many are left as they are."""
        left: int = self._let_go(thread, last)
        return left

    def metered_ns(self) -> list[int]:
        """Return what has taken how long since the last time while it was metered.

        Returns:
            [4] ns: of counted calls, of hooks on graphs, of showing outputs, and of looking at large ones.
        """
        spent = (ctypes.c_int64 * 4)()
        self._spent(spent)
        return list(spent)

    def aloud(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the training's inside of that, which is hidden from nobody."""
        return self._aloud(function, args, kwargs)

    def aloud_of(self, module: Any) -> Callable[..., Any]:
        """Return what runs a module as if hookd were not there, for a profiler to see: by its code `torch.profiler` knows a module's call."""
        return partial(self.aloud, self._whole, module)

    def register(self) -> None:
        """Do nothing: torch.compile reads a function's code, and never its entry."""

    def restore(self) -> str:
        """Give the function its own entry back.

        Returns:
            What is left where another tool has entered it after us, "" where nothing is.
        """
        is_foreign = self._unwatch(self.original, _SIZE)
        return "nn.Module.__call__: another tool has entered it after us; ours passes through" if is_foreign else ""

    def close(self) -> None:
        """Return all memory. The code stays where a call that began in it still runs, in whatever thread, or a graph has hooks of it."""
        self.plans.close()
        torch_state.quiet, torch_state.leave = torch_state.ask, torch_state.leave_in_python
        backward.marks, backward.walk_in_c = backward.NO_MARKS, backward.no_walk
        stop = native.function(self._library, "hookd_entry_stop", ctypes.c_void_p)
        if not stop(self._library._handle):
            native.unload(self._library)


def _for_marks() -> tuple[Any, Any, Any]:
    """Return what `hookd/native/marks.c` needs of torch, where it has that, and a tensor of ours; else Nones."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    queue = getattr(torch.autograd.Variable._execution_engine, "queue_callback", None)
    if None in (task, queue) or not hasattr(torch._C._FunctionBase, "_register_hook_dict"):
        return None, None, None
    with torch_state.unseen(), torch._C._DisableTorchDispatch():
        return task, queue, torch.empty(0, dtype=torch.float32, device="cpu")


def _has_usual_layout() -> bool:
    """Whether this is a CPython whose objects begin as those of the C sources do: neither traced nor free-threaded."""
    return sys.version_info >= (3, 10) and not hasattr(sys, "getobjects") and "t" not in getattr(sys, "abiflags", "")


def _offset(instance: Any, name: str) -> int | None:
    """Return where an object has one of its `__slots__`, in bytes; None where that cannot be seen."""
    mark, before = object(), getattr(instance, name)
    setattr(instance, name, mark)
    words = (ctypes.c_size_t * (type(instance).__basicsize__ // 8)).from_address(id(instance))
    found = [8 * at for at, word in enumerate(words) if word == id(mark)]
    setattr(instance, name, before)
    return found[0] if len(found) == 1 else None


def _plain() -> None:
    """Have the entry that every Python function has."""


def _ignore(*_: object) -> int:
    return 0
