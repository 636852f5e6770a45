"""How ages are written for a person."""

from __future__ import annotations

import pytest

from hookd.wording import span

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
