"""The base class of all plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hookd.api.rates import Rate


class Plugin:
    """Base class of plugins, with their settings; `hookd.api.hookspecs` describes the hooks that a plugin can implement.

    Attributes:
        name: a short lower-case word, the middle part of all its metrics' names.
        mutates: whether it may change the training. Such a plugin must be enabled by name, is never sampled, and is disarmed
            by its first error.
        mutating: the hooks in which a mutator may change the training; empty means all. A plugin that mutates only with some
            options lists them here, and sets `mutates` in its `configure`.
        sampled: hooks that are called only in sampled steps: one step in `every`. A dict `{hook: Rate(...)}` also says which of
            them are called less often than that, or more often.
        every: steps from one sampled step to the next; the option `every` overrides it, and the governor stretches it when
            the budget is exceeded.
        longest: the longest interval, in steps, to which the governor may stretch; 1 for a plugin that must not miss a step.
        apart: moves its sampled steps to steps in which no other plugin's hooks are sampled, so that its measurements do not
            include their work. A sample waits at most two intervals for such a step. An interval fixed by the user or by the
            plugin is kept. See `Context.is_alone`.
        remembers: whether hookd keeps `Context.returned` for it, for the modules at which it listens to `forward`.
        max_errors: number of errors after which the plugin is quarantined.
        requires_api: the version of hookd's API that it needs, as in `hookd.API_VERSION`; "" for any.
        readmit: whether it is readmitted after a quarantine, on probation; the option `readmit` overrides it. A mutator never
            is.
    """

    name: str = ""
    mutates: bool = False
    mutating: tuple[str, ...] = ()
    sampled: tuple[str, ...] | Mapping[str, Rate] = ()
    every: int = 1
    longest: int = 4096
    apart: bool = False
    remembers: bool = False
    max_errors: int = 10
    requires_api: str = ""
    readmit: bool = True

    @classmethod
    def changed(cls, options: dict[str, str], given: dict[str, str]) -> dict[str, str]:
        """Return the options after `hookd plugin config`: options not given stay, an empty value restores the default."""
        return {name: text for name, text in {**options, **given}.items() if text}
