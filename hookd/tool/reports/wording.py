"""Format numbers, times and a target's text for a person."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookd.wire.target import Hang


def finite(data: Any) -> Any:
    """Return data as JSON has it: NaN and infinities as strings, keys as text."""
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return data


def seconds(value: float | None) -> str:
    """Format a duration: 0.00021 is `210 µs`; None is `-`."""
    if value is None or not math.isfinite(value):
        return "-"
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= 0.9995 * unit:  # in the next unit it would be rounded to 1000
            return f"{value:.0f} s" if abs(value) >= 999.5 else f"{value / unit:.3g} {name}"
    return f"{value * 1e9:.0f} ns"


def number(value: float | None) -> str:
    """Format a number with three significant digits; None is `-`."""
    if value is None:
        return "-"
    return f"{value:.3g}"


def percent(value: float | None) -> str:
    """Format a ratio: 0.012 is `1.2 %`; None is `-`."""
    if value is None:
        return "-"
    return f"{value * 100:.1f} %" if 0 < value < 0.1 else f"{value * 100:.0f} %"


def span(value: float) -> str:
    """Format an age: 4000 s is `1h06m`."""
    age_s = int(value)
    if age_s < 60:
        return f"{age_s}s"
    if age_s < 3600:
        return f"{age_s // 60}m{age_s % 60:02}s"
    if age_s < 86400:
        return f"{age_s // 3600}h{age_s % 3600 // 60:02}m"
    return f"{age_s // 86400}d{age_s % 86400 // 3600:02}h"


def process_of(pid: int, user: str) -> str:
    """Return a process with its user, if that is known."""
    return f"process {pid}" + (f" of user {user}" if user else "")


def moment(unix_s: float) -> str:
    """Format a time in the local time zone."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):  # the time is a target's, and may be any number
        return "-"


def repeated(incident: Mapping[str, Any]) -> str:
    """Return a suffix that says how often an incident was reported, and when last; "" if once."""
    times = incident.get("count", 1)
    if not isinstance(times, int) or times < 2:
        return ""
    last = incident.get("last")
    return f" ({times:,} times, last at {moment(last) if isinstance(last, (int, float)) else '-'})"


def hang_state(hang: Hang) -> str:
    """Return `waits` for a rank that waits for others, else `hangs`."""
    return "waits" if hang.get("role") == "waits" else "hangs"


def hang_words(hang: Hang) -> str:
    """Describe where a rank hangs or waits, for which ranks, and for how long."""
    for_whom = f" for rank {', '.join(hang['waits_for'])}," if hang["waits_for"] else ""
    least = "at least " if hang["at_least"] else ""
    return f"{hang_state(hang)} {hang['where']}{for_whom} for {least}{hang['for_s']:.0f} s"


def count(number: int, what: str) -> str:
    """Format a count with its noun: `1 module`, `2 modules`."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def plain(text: str, *, lines: bool = False) -> str:
    """Escape a target's text for a terminal; `lines` keeps line breaks and tabs."""
    return "".join(char if char.isprintable() or (lines and char in "\n\t") else repr(char)[1:-1] for char in text)


def shorten(text: str, width: int) -> str:
    """Shorten a line to `width` characters, with `…` in its middle."""
    # The end of a command line says more than its middle.
    if len(text) <= width:
        return text
    head = width * 2 // 3
    return f"{text[:head]}…{text[len(text) - (width - head - 1) :]}"
