"""How ages are written for a person."""

from __future__ import annotations

import pytest

from hookd.tool.reports.wording import seconds, span

MINUTE, HOUR, DAY = 60, 3600, 86400


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.9, "0s"),
        (MINUTE - 1, "59s"),
        (MINUTE, "1m00s"),
        (HOUR - 1, "59m59s"),
        (HOUR, "1h00m"),
        (HOUR + 6 * MINUTE, "1h06m"),
        (DAY - 1, "23h59m"),
        (DAY, "1d00h"),
        (3 * DAY + 4 * HOUR, "3d04h"),
    ],
)
def test_an_age_has_its_two_largest_units(value, text):
    assert span(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0.0, "0 ns"), (9.994e-7, "999 ns"), (9.996e-7, "1 µs"), (0.00021, "210 µs"), (9.996e-4, "1 ms"),
        (0.9994, "999 ms"), (0.9996, "1 s"), (999.4, "999 s"), (1234.0, "1234 s"),
    ],
)  # fmt: skip
def test_a_duration_never_has_more_than_three_digits_but_in_seconds(value, text):
    assert seconds(value) == text
