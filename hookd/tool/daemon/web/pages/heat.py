"""Views of the heat map: three sets of columns, and the colour scale of each column."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hookd.tool.daemon.web.pages.tree import added, over, share
from hookd.tool.reports import wording

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hookd.tool.daemon.web.pages.tree import Tree

_KINDS = ("forward", "backward", "inference")
LEVELS = 9
"""Number of colour levels above that of zero."""


@dataclass(frozen=True)
class Column:
    """A column of the map.

    Attributes:
        name: its heading.
        values: values by module name.
        write: formats a value.
        scale: "share" (of 1), "size" (logarithmic), or "sign" (distance from 0, below and above).
    """

    name: str
    values: Mapping[str, float]
    write: Callable[[float], str]
    scale: str

    def colour_scale(self) -> ColourScale:
        """Return the colour scale of its values."""
        sizes = [abs(value) for value in self.values.values() if math.isfinite(value) and value]
        if self.scale == "share" or not sizes:
            return ColourScale(self.scale, 0.0, 1.0)
        return ColourScale(self.scale, min(sizes), max(sizes))


class ColourScale(NamedTuple):
    """A scale from the smallest to the largest size of a column."""

    scale: str
    low: float
    top: float

    def of(self, value: float) -> str:
        """Return the CSS class of a cell: `h0` to `h9`, with `below` for a negative value; `bad` if it is not finite."""
        if not math.isfinite(value):
            return "bad"
        size = abs(value)
        if self.scale == "size":
            spread = math.log(self.top) - math.log(self.low) if self.top > self.low else 0.0
            ratio = (
                (math.log(size) - math.log(self.low)) / spread if spread and size else float(bool(size and not spread))
            )
            level = 1 + round(ratio * (LEVELS - 1)) if size else 0
        else:
            level = math.ceil(math.sqrt(min(1.0, size / self.top)) * LEVELS)
        return f"h{min(LEVELS, max(0, level))}" + (" below" if value < 0 and self.scale == "sign" else "")


def _time(tree: Tree) -> Sequence[Column]:
    seconds = {kind: tree.values(f"hookd_timing_{kind}_seconds") for kind in _KINDS}
    calls = {kind: tree.values(f"hookd_timing_{kind}_calls") for kind in _KINDS}
    own = added(*(tree.values(f"hookd_timing_{kind}_self_seconds") for kind in _KINDS))
    spent = added(*seconds.values())
    whole = added(spent, {})
    own_share = share({**own, **{root.name: whole.get(root.name, 0.0) for root in tree.roots}}, tree.roots)
    for root in tree.roots:  # the total was only needed as the divisor
        own_share[root.name] = own.get(root.name, 0.0) / whole[root.name] if whole.get(root.name) else 0.0
    return (
        Column("share", share(spent, tree.roots), wording.percent, "share"),
        Column("own", own_share, wording.percent, "share"),
        *(Column(kind, over(seconds[kind], calls[kind]), wording.seconds, "size") for kind in _KINDS if calls[kind]),
    )


def _of_activations(*columns: tuple[str, str, Callable[[float], str], str]) -> Callable[[Tree], Sequence[Column]]:
    def made(tree: Tree) -> Sequence[Column]:
        return [
            Column(name, tree.values(f"hookd_activations_{thing}"), write, scale)
            for name, thing, write, scale in columns
        ]

    return made


class View(NamedTuple):
    """A set of columns: title, explanation, and the function that builds the columns of a tree."""

    title: str
    about: str
    columns: Callable[[Tree], Sequence[Column]]


VIEWS = {
    "time": View(
        "Time",
        "Share: part of the time of all calls, including nested modules. Own: excluding nested modules. Forward, backward"
        " and inference: time per call. The chart shows each module's own share.",
        _time,
    ),
    "activations": View(
        "Activations",
        "Statistics of the module's output at the last sampled step. Blue is below 0. The chart shows the standard deviation.",
        _of_activations(
            ("std", "std", wording.number, "size"), ("mean", "mean", wording.number, "sign"),
            ("zeros", "zero_ratio", wording.percent, "share"), ("largest", "absmax", wording.number, "size"),
        ),
    ),
    "gradients": View(
        "Gradients",
        "The module's own parameters at the last sampled step: norms of gradients and weights. Update: norm of the step's change"
        " over the norm of the weights. The chart shows the gradient norm from the first module to the last, on a logarithmic"
        " scale.",
        _of_activations(
            ("grad norm", "grad_norm", wording.number, "size"), ("weights", "weight_norm", wording.number, "size"),
            ("update", "update_ratio", wording.number, "size"), ("noise", "grad_noise_ratio", wording.percent, "share"),
        ),
    ),
}  # fmt: skip
"""Views by their name in the URL."""
CHARTED = {"time": 1, "activations": 0, "gradients": 0}
"""Index of the column of each view that the chart shows."""
