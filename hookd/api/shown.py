"""Statistics of what modules return, put into gauges without a function of a plugin's. Runs in the target.

Where calls of modules are entered in C (`hookd/native/entry.c`), so is this; elsewhere, and of what C does not look at, `Shown.add` is
called as any hook of a call.
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
USUAL, TOLD, NEW = 0.0, 1.0, 2.0


class Shown(Switched):
    """Puts statistics of what modules return into gauges.

    Args:
        context: of the plugin.
        cells: of the page.

    Attributes:
        standing: as `Switched` has it; and at ZEROS the share of zeros from which on the plugin is told, at HAS_LOOKED 1 once there was an
            output to look at.
        gauges: by the name of the statistic.
        tell: the plugin's hook, called with `module`, `output` and `summary`; None where it has none.
    """

    def __init__(self, context: Context, cells: memoryview[float]) -> None:
        super().__init__()
        self.standing.extend((0.0, 0.0))
        self.gauges: dict[str, Gauge] = {}
        self.tell: Callable[[Module, Any, Summary], Any] | None = None
        self._places: dict[int, array[float]] = context.per_module()
        self._context, self._cells = context, cells

    def has_looked(self) -> bool:
        """Return whether there was any output to look at since this was asked the last time."""
        found, self.standing[HAS_LOOKED] = self.standing[HAS_LOOKED], 0.0
        return found != 0.0

    def place_of(self, module: Module) -> array[float]:
        """Return where a module's gauges are, which the entry reads at each call.

        Returns:
            The indices of the cells in the page, in the order of STATISTICS, NOWHERE as long as there is none; and at STATE: NEW, nothing has been
            shown, and there is no series yet; TOLD, the plugin was told of the last output, for its zeros; USUAL.
        """
        found = self._places.get(module.id)
        if found is None:
            found = self._places[module.id] = array("d", [NOWHERE] * len(STATISTICS) + [NEW])
        return found

    def add(self, module: Module, output: Any) -> Any:
        """Show one output, and tell the plugin of it if it has asked for that; return what it has returned."""
        self.standing[HAS_LOOKED] = 1.0
        readable = self._context.is_readable
        tensor = next((one for one in tensors(output) if readable(one) and of_tensor(one, "is_floating_point")()), None)
        if tensor is None:
            return None
        told = output if of_tensor(tensor, "is_cpu") else None  # it is not kept until the statistics have arrived
        is_usual, answers = str(of_tensor(tensor, "dtype")) != "torch.float16", []

        def show(summary: Summary) -> None:
            place, is_odd = self._put(module, summary), summary.zero_ratio >= self.standing[ZEROS]
            was_told, place[STATE] = place[STATE] == TOLD, TOLD if is_odd else USUAL
            if self.tell is not None and (is_odd or was_told or not is_usual):
                answers.append(self.tell(module, told, summary))

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
