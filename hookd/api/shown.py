"""Statistics of module outputs in gauges, without a function of the plugin.

Where module calls are entered in C (`hookd/native/entry.c`), C sets the gauges too. Elsewhere, and for outputs that C does not read,
`Shown.add` is called like any hook of a call.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from hookd.api.nested import tensors
from hookd.api.passive import of_tensor
from hookd.api.totals import NOWHERE, Switched

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api.context import Context
    from hookd.api.events import Module
    from hookd.api.metrics import Gauge
    from hookd.api.summary import Summary

STATISTICS = ("mean", "std", "min", "max", "absmax", "norm", "zero_ratio", "nonfinite")
"""Attributes of a `Summary` that can be shown, in the order of `hookd/native/entry.h`."""
ZEROS, HAS_LOOKED = 3, 4
STATE = len(STATISTICS)
USUAL, REPORTED, NEW = 0.0, 1.0, 2.0


class Shown(Switched):
    """Sets gauges to statistics of module outputs.

    Attributes:
        standing: as in `Switched`, and also: at ZEROS the share of zeros from which on the plugin's hook is called, at HAS_LOOKED 1 once
            an output has been read.
        gauges: by the name of the statistic.
        callback: the plugin's hook, called with `module`, `output` and `summary`; None if it has none.
    """

    def __init__(self, context: Context, cells: memoryview[float]) -> None:
        super().__init__()
        self.standing.extend((0.0, 0.0))
        self.gauges: dict[str, Gauge] = {}
        self.callback: Callable[[Module, Any, Summary], Any] | None = None
        self._places: dict[int, array[float]] = context.per_module()
        self._context, self._cells = context, cells

    def has_looked(self) -> bool:
        """Return whether any output was read since the last call."""
        was_read, self.standing[HAS_LOOKED] = self.standing[HAS_LOOKED], 0.0
        return was_read != 0.0

    def place_of(self, module: Module) -> array[float]:
        """Return the places of a module's gauges, which the entry reads at each call.

        Returns:
            The indices of the cells in the page, in the order of STATISTICS, NOWHERE while there is none; and at STATE one of: NEW, nothing
            was shown yet, and there is no series; REPORTED, the plugin's hook was called for the last output because of its zeros; USUAL.
        """
        place = self._places.get(module.id)
        if place is None:
            place = self._places[module.id] = array("d", [NOWHERE] * len(STATISTICS) + [NEW])
        return place

    def add(self, module: Module, output: Any) -> Any:
        """Show one output, and call the plugin's hook if the output calls for it; return the hook's value."""
        self.standing[HAS_LOOKED] = 1.0
        readable = self._context.is_readable
        tensor = next((t for t in tensors(output) if readable(t) and of_tensor(t, "is_floating_point")()), None)
        if tensor is None:
            return None
        # On a device the statistics arrive later, and the output is not kept until then.
        passed = output if of_tensor(tensor, "is_cpu") else None
        is_usual, answers = str(of_tensor(tensor, "dtype")) != "torch.float16", []

        def show(summary: Summary) -> None:
            place, is_odd = self._put(module, summary), summary.zero_ratio >= self.standing[ZEROS]
            was_odd, place[STATE] = place[STATE] == REPORTED, REPORTED if is_odd else USUAL
            if self.callback is not None and (is_odd or was_odd or not is_usual):
                answers.append(self.callback(module, passed, summary))

        self._context.summary(tensor, show)
        return answers[0] if answers else None

    def _put(self, module: Module, summary: Summary) -> array[float]:
        place = self.place_of(module)
        if place[STATE] == NEW:
            for at, gauge in enumerate(map(self.gauges.get, STATISTICS)):
                place[at] = NOWHERE if gauge is None else gauge.labels(module.name).at
        for at, name in enumerate(STATISTICS):
            if place[at] >= 0:
                self._cells[int(place[at])] = getattr(summary, name)
        return place
