"""The frame of every page: head, navigation and refresh."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hookd.tool.daemon.web.pages import assets
from hookd.tool.daemon.web.pages.html import Markup, link, tag
from hookd.tool.reports.wording import moment
from hookd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

REFRESH_S = 10
"""Reload interval of browsers without JavaScript, in seconds; the script fetches changed sections, see page.js."""
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Content-Security-Policy: our own files only. Forms may be sent to us: the search works without JavaScript."""


def page(title: str, parts: Sequence[Markup], *, is_live: bool = True) -> str:
    """Return a whole HTML page.

    Args:
        title: title for the browser's tab.
        parts: content; its sections are refreshed while the page is visible.
        is_live: whether the page is refreshed at all.
    """
    reload = tag("noscript", tag("meta", http_equiv="refresh", content=REFRESH_S)) if is_live else None
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("title", f"{title} · hookd"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="stylesheet", href=assets.path(assets.STYLE)),
        tag("link", rel="icon", href=_ICON),
        reload,
        tag("script", src=assets.path(assets.SCRIPT), defer=True),
    )
    skip = link("#main", "Skip to the content", class_="skip")
    body = tag(
        "body", skip, _header(is_live=is_live), tag("main", *parts, id="main", tabindex=-1), _footer(), class_="web"
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath fill='none'"
    " stroke='%232a78d6' stroke-width='2.4' d='M4 1v9a4 4 0 0 0 8 0V8m-2.5 2L12 7.5 14.5 10'/%3E%3C/svg%3E"
)


def _header(*, is_live: bool) -> Markup:
    places = {"/": "Targets", "/metrics": "Metrics", "/sd": "Service discovery", "/api/v1/targets": "Targets (JSON)",
              "/api/v1/incidents": "Incidents (JSON)"}  # fmt: skip
    nav = tag("nav", *(link(where, name) for where, name in places.items()), aria_label="Pages")
    return tag("header", link("/", "hookd", class_="brand"), nav, tag("p", id="live", class_="soft", data_live=is_live))


def _footer() -> Markup:
    said = f"hookd {__version__} · rendered {moment(time.time())} · documentation: docs/ in hookd's sources"
    return tag("footer", said)
