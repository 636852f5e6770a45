"""How often hookd calls a plugin's sampled hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Rate:
    """How often a sampled hook is called; the fields say how it differs from the plugin's other hooks.

    Set `longest` or `stretched_last`, not both. The option `every` is the first interval of such a hook, and fixes that of
    the others.

    Attributes:
        longest: for a hook that costs much more than the others: if the budget is still exceeded at the plugin's longest
            interval, this hook's interval grows further, up to this number of steps. 0: the plugin's own `longest` applies.
        stretched_last: for a hook that is called in every step while the budget allows. Its interval grows, up to the plugin's
            `longest`, only once all other hooks have reached their longest interval. It is called in every step in which any
            other one is.
        unless_finite: for `backward_pre` and `backward`: the hook need not be called for a submodule whose gradients are all
            known to be finite; `-inf` is not. hookd itself checks small gradients in host memory, at a tenth of the cost of a
            call. The hook is still called where finiteness is not known, and always for the model as a whole.
    """

    longest: int = 0
    stretched_last: bool = False
    unless_finite: bool = False

    @property
    def is_usual(self) -> bool:
        """Whether the hook has the plugin's usual interval, which the option `every` fixes."""
        return not (self.longest or self.stretched_last)


def rates_of(sampled: tuple[str, ...] | Mapping[str, Rate]) -> dict[str, Rate]:
    """Return the rate of each hook in `Plugin.sampled`."""
    return dict(sampled) if isinstance(sampled, dict) else dict.fromkeys(sampled, Rate())


def problem(sampled: Mapping[str, Any], longest: int) -> tuple[str, str] | None:
    """Return what is wrong with a plugin's rates, as its author has written them, and the fix; None if nothing is."""
    for hook, rate in sampled.items():
        where = f"sampled[{hook!r}]"
        if not isinstance(rate, Rate):
            return f"{where} is {rate!r}, but must be a Rate", f'Write {{"{hook}": Rate()}}.'
        if rate.longest and rate.stretched_last:
            return f"{where} has both longest and stretched_last", "Remove one of them."
        if rate.longest and rate.longest < longest:
            message = f"{where} has longest={rate.longest}, less than the plugin's {longest}"
            return message, "Lower the plugin's `longest`."
        if rate.unless_finite and hook not in ("backward_pre", "backward"):
            return f"{where} has unless_finite, which only backward_pre and backward can have", "Remove it."
    found = sorted({rate.longest for rate in sampled.values() if rate.longest})
    if len(found) > 1:
        said = " and ".join(map(str, found))
        return f"rates in sampled have different longest intervals: {said}", "Give all of them the same."
    return None
