"""What a person is told of a plugin's error: the author's own line first, then the way there. Runs in the target."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from hookd.page.layout import clean

if TYPE_CHECKING:
    from hookd.plugin import Plugin

LONGEST = 1500
"""Characters of a traceback, the last ones: it stands in the page's identity, with those of all other plugins."""
_ROOT = "/hookd-payload/"


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
        found["where"] = clean(author_line(plugin, error), 500)
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        found["traceback"] = clean(trace[-LONGEST:], LONGEST)
    return found


def author_line(plugin: Plugin, error: BaseException) -> str:
    """Give the innermost line of the plugin's own package that an error has come through; "" where it has none."""
    own = type(plugin).__module__.partition(".")[0]
    found = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] == own:
            (summary,) = traceback.StackSummary.extract(iter([(frame, number)]))
            file = summary.filename.removeprefix(_ROOT)
            found = f"{file}:{number}, in {summary.name}: {summary.line}"
    return found
