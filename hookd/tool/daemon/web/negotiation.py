"""Content negotiation for `/metrics`: weights of Accept headers (RFC 9110, 12.4.2), which prometheus_client ignores."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_FORMATS = ("application/openmetrics-text", "text/plain", "text/*", "*/*")


def preferred(accept: str) -> str:
    """Return the parts of an Accept header with the highest weight among our formats; "" if there are none."""
    parts = [(weight, part) for name, weight, part in _parts(accept) if name in _FORMATS and weight > 0]
    best = max((weight for weight, _ in parts), default=0.0)
    return ",".join(part for weight, part in parts if weight == best)


def takes_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header names gzip with a weight above 0."""
    return any(name == "gzip" and weight > 0 for name, weight, _ in _parts(accept_encoding))


def _parts(header: str) -> Iterator[tuple[str, float, str]]:
    """Yield name, weight and text of each alternative."""
    for part in header.split(","):
        name, *parameters = (word.strip() for word in part.split(";"))
        weight = 1.0
        for parameter in parameters:
            if parameter[:2].lower() == "q=":
                try:
                    weight = float(parameter[2:])
                except ValueError:
                    weight = 0.0
        yield name.lower(), weight, part.strip()
