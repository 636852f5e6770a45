"""The times of a target's last steps, from the recorder of its page.

There are few enough points to draw, and no long step is lost.
"""

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
"""Maximum number of points of a curve."""


def of(records: Iterable[Record], points: int = POINTS) -> list[CurvePoint]:
    """Return the steps of a recorder as the points of a curve, in order.

    Returns:
        One point for every few consecutive steps: `step`, the number of the last one, counted from the attach; `time`, its end
        in unix seconds; `seconds`, the median; `longest`.
    """
    steps = [
        record
        for record in records
        if record.kind == STEP_RECORD and 0 < record.value < math.inf and 0 < record.when < 1e11
    ]
    each = max(1, math.ceil(len(steps) / points))
    return [_point(steps[at : at + each]) for at in range(0, len(steps), each)]


def _point(steps: list[Record]) -> CurvePoint:
    seconds = [record.value for record in steps]
    last = steps[-1]
    return {"step": last.step, "time": last.when, "seconds": statistics.median(seconds), "longest": max(seconds)}
