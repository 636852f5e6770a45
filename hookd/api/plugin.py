"""The base class of all plugins."""

from __future__ import annotations


class Plugin:
    """Base class of plugins, with their settings; `hookd.api.hookspecs` describes the hooks that a plugin can implement.

    Attributes:
        name: a short lower-case word, the middle part of all its metrics' names.
        mutates: whether it may change the training. Such a plugin must be enabled by name, is never sampled, and is disarmed
            by its first error.
        mutating: the hooks in which a mutator may change the training; empty means all. A plugin that mutates only with some
            options lists them here, and sets `mutates` in its `configure`.
        sampled: hooks that are called only in sampled steps: one step in `every`.
        every: steps from one sampled step to the next; the option `every` overrides it, and the governor stretches it when
            the budget is exceeded.
        longest: the longest interval, in steps, to which the governor may stretch; 1 for a plugin that must not miss a step.
        rare: sampled hooks that cost much more than the others. If the budget is still exceeded at `longest`, their interval
            grows further, up to `rarest`. Effective only if both are set.
        rarest: the longest interval of the hooks in `rare`, in steps.
        sampled_last: sampled hooks that are called at every step while the budget allows. Their interval grows, up to `longest`,
            only once all other hooks of the plugin have reached their longest interval. They are called in every step in which
            any other one is.
        fixed_by_every: sampled hooks whose interval the option `every` fixes; empty means all. The others begin with that
            interval, and the governor stretches it.
        apart: moves its sampled steps to steps in which no other plugin's hooks are sampled, so that its measurements do not
            include their work. A sample waits at most two intervals for such a step. An interval fixed by the user or by the
            plugin is kept. See `Context.is_alone`.
        unless_finite: which of `backward_pre` and `backward` need not be called for a submodule whose gradients are all known to
            be finite; `-inf` is not. hookd itself checks small gradients in host memory, at a tenth of the cost of a call.
            The hooks are still called where finiteness is not known, and always for the model as a whole.
        remembers: whether hookd keeps `Context.returned` for it, for the modules at which it listens to `forward`.
        max_errors: number of errors after which the plugin is quarantined.
        requires_api: the version of hookd's API that it needs, as in `hookd.API_VERSION`; "" for any.
        readmit: whether it is readmitted after a quarantine, on probation; the option `readmit` overrides it. A mutator never
            is.
    """

    name: str = ""
    mutates: bool = False
    mutating: tuple[str, ...] = ()
    sampled: tuple[str, ...] = ()
    every: int = 1
    longest: int = 4096
    rare: tuple[str, ...] = ()
    rarest: int = 0
    sampled_last: tuple[str, ...] = ()
    fixed_by_every: tuple[str, ...] = ()
    apart: bool = False
    unless_finite: tuple[str, ...] = ()
    remembers: bool = False
    max_errors: int = 10
    requires_api: str = ""
    readmit: bool = True

    @classmethod
    def changed(cls, options: dict[str, str], given: dict[str, str]) -> dict[str, str]:
        """Return the options after `hookd plugin config`: options not given stay, an empty value restores the default."""
        return {name: text for name, text in {**options, **given}.items() if text}
