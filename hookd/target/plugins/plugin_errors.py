"""Errors that leave a plugin, or hookd itself: counted, logged, and kept from the training code. Runs in the target."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import TYPE_CHECKING

from hookd.errors import TrainingError, worded
from hookd.target.plugins.faults import for_program, is_from_signal_handler
from hookd.target.plugins.rules import where
from hookd.wire.page.layout import clean
from hookd.wire.plugin_frames import author_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.api import metrics
    from hookd.api.plugin import Plugin
    from hookd.target.boot.arming import Life
    from hookd.target.plugins.listeners import Entry, Registry
    from hookd.wire.page import PageWriter

LOGGED = 10
"""How often an error of hookd's own is logged at one place: a traceback at every call would cost more than the call."""

LONGEST = 1500
"""Characters of a traceback, the last ones: it stands in the page's identity, with those of all other plugins."""


class Errors:
    """Counts errors, and has plugins stopped that make too many.

    Args:
        counter: of plugins' errors, by plugin.
    """

    def __init__(self, *, registry: Registry, page: PageWriter, counter: metrics.Counter, life: Life) -> None:
        self._registry, self._page, self._counter, self._life = registry, page, counter, life
        self._failures: Counter[str] = Counter()
        self._quarantine: Callable[[Entry, str], None] = _nobody

    def stop_with(self, quarantine: Callable[[Entry, str], None]) -> None:
        """Set what stops a plugin, which itself reports errors here."""
        self._quarantine = quarantine

    # -- of plugins

    def fault(self, number: int, hook: str, error: BaseException) -> None:
        """Deal with what left a plugin: count it, or pass on what belongs to the training code."""
        if is_from_signal_handler(error):
            raise error
        entry = self._registry.get(number)
        if entry is not None and entry.plugin.mutates and isinstance(error, TrainingError):
            raise for_program(error)
        if entry is not None:
            self._count(entry, hook, worded(error), error)

    def failed_aside(self, plugin: str, error: BaseException) -> None:
        """Count what left a plugin in hookd's own thread."""
        if self._registry.has(plugin):
            self.failed(self._registry.named(plugin), "aside", error)

    def failed(self, entry: Entry, hook: str, error: BaseException) -> None:
        """Count what left a plugin where there is no training code to pass it on to."""
        self._count(entry, hook, worded(error), error)

    def late(self, entry: Entry, hook: str, text: str, where: str) -> None:
        """Count a hook that takes far too long, and quarantine its plugin at once.

        Args:
            entry: of the plugin.
            hook: which one.
            text: what is wrong, in words.
            where: the author's line that it is at, "" if that is not known.
        """
        self._count(entry, hook, text, None)
        entry.last_trouble = {**entry.last_trouble, "where": where}
        if entry.state == "active":
            self._quarantine(entry, text)

    def stray(self, number: int, hook: str) -> None:
        """Count a result that an observer has returned."""
        entry = self._registry.get(number)
        if entry is not None:
            call = next((one.call for one in entry.listeners if one.hook == hook), None)
            text = f"{hook} returned something, which only a mutating plugin may ({where(call)})"
            self._count(entry, hook, text, None)

    def _count(self, entry: Entry, hook: str, text: str, error: BaseException | None) -> None:
        entry.errors += 1
        entry.last_error = text
        entry.last_trouble = trouble(entry.plugin, hook, text, error)
        self._counter.labels(entry.name).inc()
        if hook not in entry.logged:
            entry.logged.add(hook)
            told = entry.last_trouble
            line = f" ({told['where']})" if told["where"] else ""
            self._page.log("error", f"plugin {entry.name}: {hook}: {text}{line}\n{told['traceback']}".rstrip())
        entry.strikes += 1
        if entry.strikes >= entry.max_strikes and entry.state == "active":
            self._quarantine(entry, f"{entry.errors} errors, the last in {hook}: {text}")

    # -- of hookd

    def own_failure(self, where: str, error: BaseException) -> None:
        """Log an error of hookd itself, which must not reach the training code; the first ones at each place.

        After a detach there is no page to log to.
        """
        if is_from_signal_handler(error) or isinstance(error, TrainingError):
            raise error
        self._failures[where] += 1
        if self._life.is_live and self._failures[where] <= LOGGED:
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self._page.log("error", f"hookd itself: {where}: {trace}")


def _nobody(_entry: Entry, _why: str) -> None:
    """Stand in for what stops a plugin, before any is loaded."""


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
