"""Memory that each plugin retains, as far as its attributes lead there. Runs in hookd's own thread, twice a minute.

Allocations are not traced, because tracemalloc slows down every allocation of the training. Instead, this follows the
plugin's attributes, through containers and objects of its own package. It misses objects in globals, in closures and in C.
A tensor counts with its storage, and a shared storage counts once.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from hookd.api.nested import FROZEN
from hookd.target.plugins.faults import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hookd.api.metrics import Gauge
    from hookd.api.plugin import Plugin
    from hookd.target.plugins.incidents import Incidents
    from hookd.target.plugins.listeners import Loaded, Registry

EVERY_TICKS = 30
MEASUREMENTS = 5
"""Number of consecutive measurements that must each have found more than the last."""
LIMIT_BYTES, LIMIT_ITEMS = 256 << 20, 1_000_000
"""A plugin below both limits, bytes of tensors and items in containers, may grow."""
MOST = 5000
"""The most objects that one measurement visits in one plugin."""
_PLAIN = (bool, int, float, str, bytes, type(None))
_DICTS = (dict, FROZEN)
_CONTAINERS = (list, tuple, set, frozenset, deque, *_DICTS)


class Size(NamedTuple):
    """The size of a plugin: bytes of tensor storage, and items in containers."""

    bytes: int
    items: int


def size_of(plugin: Plugin) -> Size:
    """Measure the memory that a plugin retains: each container by its length, visiting at most MOST objects."""
    own = type(plugin).__module__.partition(".")[0]
    seen: set[int] = {id(plugin)}
    memory: dict[int, int] = {}
    items = 0
    todo: list[Any] = list(vars(plugin).values())
    while todo and len(seen) < MOST:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = type(value)  # isinstance() raises for a weakref proxy whose object is gone
        if issubclass(kind, Tensor):
            memory.update([_memory(value)])
        elif issubclass(kind, _CONTAINERS):
            items += len(value)
            todo += _first(value.values() if issubclass(kind, _DICTS) else value)
        elif kind.__module__.partition(".")[0] == own and hasattr(value, "__dict__"):
            todo += list(vars(value).values())
    return Size(sum(memory.values()), items)


def _first(contents: Iterable[Any]) -> list[Any]:
    """Return the first objects in a container that another thread may be filling; none if it changes meanwhile."""
    try:
        return [value for value in islice(contents, MOST) if not isinstance(value, _PLAIN)]
    except RuntimeError:
        return []


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return address and size in bytes of a tensor's storage; (0, 0) if it has none."""
    try:
        storage: Any = getattr(tensor, "untyped_storage", tensor.storage)()  # torch before 2.0 has only `storage`
        return storage.data_ptr(), storage.nbytes()
    except Failure:  # fake, sparse, a subclass that refuses
        return 0, 0


class MemoryWatch:
    """Measures all plugins from time to time, and quarantines one whose memory keeps growing."""

    def __init__(
        self, *, registry: Registry, gauge: Gauge, incidents: Incidents, quarantine: Callable[[Loaded, str], None]
    ) -> None:
        self._registry, self._gauge, self._incidents, self._quarantine = registry, gauge, incidents, quarantine
        self._ticks = 0
        self._last: dict[int, Size] = {}
        self._grown: dict[int, int] = {}

    def tick(self) -> None:
        """Count a tick, and measure at every `EVERY_TICKS`-th."""
        self._ticks += 1
        if self._ticks % EVERY_TICKS == 0:
            entries = list(self._registry)
            for loaded in entries:
                self._measure(loaded)
            there = {loaded.number for loaded in entries}
            for gone in set(self._last) - there:
                del self._last[gone], self._grown[gone]

    def _measure(self, loaded: Loaded) -> None:
        now, before = size_of(loaded.plugin), self._last.get(loaded.number, Size(0, 0))
        self._gauge.labels(loaded.name).set(float(now.bytes))
        self._last[loaded.number] = now
        has_grown = now.bytes > before.bytes or now.items > before.items
        grown = self._grown[loaded.number] = self._grown.get(loaded.number, 0) + 1 if has_grown else 0
        is_much = now.bytes > LIMIT_BYTES or now.items > LIMIT_ITEMS
        if grown < MEASUREMENTS or not is_much or loaded.state != "active":
            return
        self._grown[loaded.number] = 0
        why = f"it keeps {now.bytes / 1e6:.4g} MB in tensors and {now.items} items in containers, more at each measurement"
        if loaded.plugin.mutates:  # stopping a mutator in mid-training would do more harm
            self._incidents.report(loaded.name, "plugin_memory", f"plugin {loaded.name}: {why}", {"error": why})
        else:
            self._quarantine(loaded, why)
