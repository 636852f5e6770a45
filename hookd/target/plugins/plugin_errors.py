"""Errors of plugins and of hookd itself: counted, logged, and kept from the training code."""

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
    from hookd.target.plugins.listeners import Loaded, Registry
    from hookd.wire.hook_error import HookError
    from hookd.wire.page import PageWriter

LOGGED = 10
"""Number of times that an error of hookd's own is logged per place: a traceback at every call would cost more than the call."""

LONGEST = 1500
"""Characters kept of a traceback, its last ones: the page's identity holds those of all plugins."""


class Errors:
    """Counts errors, and quarantines plugins with too many."""

    def __init__(self, *, registry: Registry, page: PageWriter, counter: metrics.Counter, life: Life) -> None:
        self._registry, self._page, self._counter, self._life = registry, page, counter, life
        self._failures: Counter[str] = Counter()
        self._quarantine: Callable[[Loaded, str], None] = lambda _loaded, _why: None

    def stop_with(self, quarantine: Callable[[Loaded, str], None]) -> None:
        """Set the function that quarantines a plugin; it is set late, because it reports errors here itself."""
        self._quarantine = quarantine

    # -- of plugins

    def fault(self, number: int, hook: str, error: BaseException) -> None:
        """Count an exception that left a plugin, or raise it again if it belongs to the training code."""
        if is_from_signal_handler(error):
            raise error
        loaded = self._registry.get(number)
        if loaded is not None and loaded.plugin.mutates and isinstance(error, TrainingError):
            raise for_program(error)
        if loaded is not None:
            self._count(loaded, hook, worded(error), error)

    def failed_in_background(self, plugin: str, error: BaseException) -> None:
        """Count an exception that left a plugin's background work."""
        if self._registry.has(plugin):
            self.failed(self._registry.named(plugin), "aside", error)

    def failed(self, loaded: Loaded, hook: str, error: BaseException) -> None:
        """Count an exception that left a plugin in a thread without training code."""
        self._count(loaded, hook, worded(error), error)

    def late(self, loaded: Loaded, hook: str, text: str, where: str) -> None:
        """Count a hook that takes far too long, and quarantine its plugin at once; `where` is its line in the source, if known."""
        self._count(loaded, hook, text, None)
        loaded.last_error["where"] = where
        if loaded.state == "active":
            self._quarantine(loaded, text)

    def stray(self, number: int, hook: str) -> None:
        """Count a value returned by an observer, which may not return one."""
        loaded = self._registry.get(number)
        if loaded is not None:
            call = next((listener.call for listener in loaded.listeners if listener.hook == hook), None)
            text = f"{hook} returned something, which only a mutating plugin may ({where(call)})"
            self._count(loaded, hook, text, None)

    def _count(self, loaded: Loaded, hook: str, text: str, error: BaseException | None) -> None:
        loaded.errors += 1
        loaded.last_error = described(loaded.plugin, hook, text, error)
        self._counter.labels(loaded.name).inc()
        if hook not in loaded.logged:
            loaded.logged.add(hook)
            last = loaded.last_error
            line = f" ({last['where']})" if last["where"] else ""
            self._page.log("error", f"plugin {loaded.name}: {hook}: {text}{line}\n{last['traceback']}".rstrip())
        loaded.strikes += 1
        if loaded.strikes >= loaded.max_strikes and loaded.state == "active":
            self._quarantine(loaded, f"{loaded.errors} errors, the last in {hook}: {text}")

    # -- of hookd

    def own_failure(self, where: str, error: BaseException) -> None:
        """Log an error of hookd itself, which must not reach the training code: the first `LOGGED` at each place.

        Nothing is logged after a detach, because there is no page.
        """
        if is_from_signal_handler(error) or isinstance(error, TrainingError):
            raise error
        self._failures[where] += 1
        if self._life.is_live and self._failures[where] <= LOGGED:
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self._page.log("error", f"hookd itself: {where}: {trace}")


def described(plugin: Plugin, hook: str, text: str, error: BaseException | None) -> HookError:
    """Describe an error of a plugin, from the error in words and the exception, if there is one."""
    row: HookError = {"hook": hook, "text": clean(text, 500), "where": "", "traceback": ""}
    if error is not None:
        row["where"] = clean(author_line(error, plugin), 500)
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        row["traceback"] = clean(trace[-LONGEST:], LONGEST)
    return row
