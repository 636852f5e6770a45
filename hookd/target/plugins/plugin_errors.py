"""What a person is told of a plugin's error: the author's own line first, then the way there. Runs in the target."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from hookd.wire.page.layout import clean
from hookd.wire.plugin_frames import author_line

if TYPE_CHECKING:
    from hookd.api.plugin import Plugin

LONGEST = 1500
"""Characters of a traceback, the last ones: it stands in the page's identity, with those of all other plugins."""


def trouble(plugin: Plugin, hook: str, text: str, error: BaseException | None) -> dict[str, str]:
    """Describe an error that a plugin has made.

    Args:
        plugin: whose error it is.
        hook: in which hook.
        text: the error in words.
        error: what it raised; None where it raised nothing.

    Returns:
        `hook`, `text`, `where` (FILE:LINE, in FUNCTION: the line) and `traceback`; the last two may be "".
    """
    found = {"hook": hook, "text": clean(text, 500), "where": "", "traceback": ""}
    if error is not None:
        found["where"] = clean(author_line(error, plugin), 500)
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        found["traceback"] = clean(trace[-LONGEST:], LONGEST)
    return found
