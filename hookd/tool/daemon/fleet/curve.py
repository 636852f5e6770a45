"""The times of a target's last steps, from the recorder of its page: few enough to draw, and no long step is lost."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from hookd.wire.page import STEP_RECORD

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hookd.wire.page import Record
    from hookd.wire.report import CurvePoint

POINTS = 400
"""Points of a curve at most."""


def of(records: Iterable[Record], points: int = POINTS) -> list[CurvePoint]:
    """Gather the steps of a recorder, in order.

    Returns:
        For as many steps in a row as it takes: `step`, the last of them, counted from the attach; `time` of its end in
        unix seconds; `seconds`, the median; `longest`.
    """
    steps = [one for one in records if one.kind == STEP_RECORD and 0 < one.value < math.inf and 0 < one.when < 1e11]
    each = max(1, math.ceil(len(steps) / points))
    return [_point(steps[at : at + each]) for at in range(0, len(steps), each)]


def _point(steps: list[Record]) -> CurvePoint:
    seconds = [one.value for one in steps]
    last = steps[-1]
    return {"step": last.step, "time": last.when, "seconds": statistics.median(seconds), "longest": max(seconds)}
