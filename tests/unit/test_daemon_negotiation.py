"""The format that the headers of a scrape choose."""

from __future__ import annotations

import pytest
from prometheus_client.exposition import choose_encoder

from hookd.tool.daemon.web.negotiation import preferred, takes_gzip

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (PROMETHEUS, "application/openmetrics-text; version=1.0.0"),
        ("text/plain, application/openmetrics-text; q=0.1", "text/plain"),
        ("application/openmetrics-text; Q=0, */*", "text/plain"),
        ("application/openmetrics-text; q=0.9, text/plain;q=0.8", "application/openmetrics-text"),
        ("text/html, application/xhtml+xml, */*;q=0.8", "text/plain"),
        ("application/openmetrics-text; q=strange", "text/plain"),
        ("", "text/plain"),
    ],
)
def test_the_format_with_the_highest_weight_is_chosen(accept, chosen):
    assert choose_encoder(preferred(accept))[1].startswith(chosen)


def test_who_wants_no_gzip_gets_none():
    assert [takes_gzip(header) for header in ("gzip", "br, gzip;q=0.1", "gzip;q=0", "gzip; q=0.0, *", "br", "")] == [
        True, True, False, False, False, False,
    ]  # fmt: skip
