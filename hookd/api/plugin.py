"""The base class of all plugins. Runs in the target."""

from __future__ import annotations


class Plugin:
    """What a plugin says about itself; the hooks that it can implement are in `hookd.api.hookspecs`.

    Attributes:
        name: a short lower-case word, the middle of all its metrics' names.
        mutates: whether it may change training. It must then be enabled by name, is never sampled, and an error in
            it disarms it at once.
        mutating: the hooks in which it may, where it mutates; all of them where none is named. What mutates with some
            options alone names them, and sets `mutates` in its `configure`.
        sampled: hooks that are called only on sampled steps: one step in `every`.
        every: how many steps lie between two sampled steps; the option `every` overrides it, and the governor
            stretches it when the budget is exceeded.
        longest: the longest interval, in steps, to which the governor may stretch; what must not miss a step says 1.
        rare: which of the sampled hooks cost much more than the others, and may be stretched to `rarest` steps: where the
            budget still does not do, they become rarer than `longest`. Only where both are set.
        rarest: the longest interval of those, in steps.
        sampled_last: which of the sampled hooks are called at every step as long as the budget allows: they become rarer, up to
            `longest`, only once all others of the plugin are as rare as they may be. They are called in every step in which any
            other one is.
        fixed_by_every: which of the sampled hooks the option `every` fixes; all of them where none is named. The
            others begin with that interval, and the governor stretches it.
        apart: moves its sampled steps to steps in which no other plugin's hooks are sampled, so that what those do is not in
            what it measures. A sample waits for such a step for two intervals; an interval that the person or
            the plugin has fixed is kept. See `Context.is_alone`.
        unless_finite: which of `backward_pre` and `backward` need not be called for a module inside a model where every gradient
            is known to be finite, without `-inf` too. hookd looks at small ones in the host's memory itself, at a tenth of the
            cost of a call. They are called all the same where nobody can say, and always for the model as a whole.
        remembers: whether `Context.returned` is kept for it, for the modules at which it listens to `forward`.
        max_errors: how many errors quarantine the plugin.
        requires_api: the version of hookd's API that it needs, as in `hookd.API_VERSION`; "" for any.
        readmit: whether it comes back by itself after a quarantine, on probation; the option `readmit` overrides it. What
            changes the training never does.
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
        """Give the options after `hookd plugin config`: those that are not given stay, an empty value takes one back."""
        return {name: text for name, text in {**options, **given}.items() if text}
