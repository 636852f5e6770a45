"""Show the state of optimizers: learning rate, momentum, weight norms, loss scale, skipped steps.

    hookd_optimizer_steps_total{optimizer}             calls of its `step`
    hookd_optimizer_lr{optimizer,group}                as of the last sampled step: one step in `every`, before a
    hookd_optimizer_momentum{optimizer,group}          scheduler changes it; momentum, or the first beta of Adam and similar
    hookd_optimizer_beta2{optimizer,group}             the second beta
    hookd_optimizer_weight_decay{optimizer,group}
    hookd_optimizer_weight_norm{optimizer,group}       L2 norm of the group's parameters, over their finite elements
    hookd_optimizer_loss_scale                         of the GradScaler, at the last step that was not skipped
    hookd_optimizer_skipped_steps_total                steps that the GradScaler skipped, counted when the next one is not

`optimizer` is the name of the class; for a second optimizer it begins with `#2.`. `group` counts from 0. Only eight
optimizers are shown, and `groups` groups of each; the log says if there are more.

The norm of a group is summed up over several sampled steps, with at most `elements` elements in each, so that no step
bears the whole cost. It is therefore a little older than the other values, and the first parameters of a group are
older than the last. For distributed parameters it covers this rank's part.

At each step the loss scale is read from the GradScaler that called it. The number of skipped steps follows from how
often the scale was reduced since the call before; several optimizers of one scaler count as one. After an attach, skips
are counted from the first step that is not skipped. Without a GradScaler these two metrics have no series.

Options: `every=N`, `groups=N` (32), `elements=N` (4000000).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from hookd import Context, Plugin, groups_of, hookimpl
from hookd_optimizer.norms import Norms
from hookd_optimizer.scale import Scale, scaler_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

    from hookd import Gauge

OPTIMIZERS = 8
BOTH = ["optimizer", "group"]


class Watched(NamedTuple):
    """One optimizer, with the value of its label and the progress of its norms."""

    ref: weakref.ref[Optimizer]
    ordinal: int
    label: str
    norms: Norms


class Optimizers(Plugin):
    """Shows learning rates, momentum, weight norms, the loss scale and skipped steps of each optimizer."""

    name = "optimizer"
    sampled = ("step_post",)
    every = 10

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options and declare the metrics."""
        self.context = context
        self.most_groups = context.option("groups", 32, least=1)
        self.elements = context.option("elements", 4_000_000, least=1)
        self.steps = context.counter("steps", "Calls of the optimizer's step.", ["optimizer"])
        self.gauges = {
            "lr": context.gauge("lr", "Learning rate.", BOTH),
            "momentum": context.gauge("momentum", "Momentum, or the first beta.", BOTH),
            "beta2": context.gauge("beta2", "The second beta.", BOTH),
            "weight_decay": context.gauge("weight_decay", "Weight decay.", BOTH),
        }
        self.weight_norm = context.gauge("weight_norm", "L2 norm of the group's parameters.", BOTH)
        self.scale = Scale(context)
        self.watched: dict[int, Watched] = {}  # by the optimizer's id: it may not be hashable
        self.shown: dict[str, int] = {}  # by label: the number of groups that have series
        self.is_reported = False

    @hookimpl
    def step_pre(self, optimizer: Optimizer) -> None:
        """Count the step, and request the loss scale of its gradients."""
        watched = self._known(optimizer) or self._watch(optimizer)
        if watched is not None:
            self.steps.labels(watched.label).inc()
        scaler = scaler_of(optimizer)
        if scaler is not None:
            self.scale.request(scaler, optimizer)

    @hookimpl
    def step_post(self, optimizer: Optimizer) -> None:
        """Publish the settings of the groups, and add up the norms of the next parameters."""
        watched = self._known(optimizer)
        if watched is None:
            return
        every = groups_of(optimizer)
        groups = every[: self.most_groups]
        self._forget(watched.label, len(groups))
        self.shown[watched.label] = len(groups)
        if len(every) > self.most_groups:
            self._log(f"only {self.most_groups} of {len(every)} groups of {watched.label} are shown")
        for at, group in enumerate(groups):
            for name, value in settings(group):
                self._store(self.gauges[name], value, watched.label, str(at))
        watched.norms.advance([group["params"] for group in groups], self.elements)

    def _store(self, gauge: Gauge, value: Any, *labels: str) -> None:
        if issubclass(type(value), Tensor):  # a `capturable` optimizer has its learning rate on the device
            if self.context.is_readable(value):
                self.context.later([value.detach().clone()], lambda numbers: gauge.labels(*labels).set(numbers[0]))
        else:
            gauge.labels(*labels).set((float if issubclass(type(value), float) else int).__float__(value))

    def _watch(self, optimizer: Optimizer) -> Watched | None:
        """Assign a label to a new optimizer; a recreated one reuses the label of the one that is gone."""
        self.watched = {key: watched for key, watched in self.watched.items() if watched.ref() is not None}
        taken = {watched.ordinal for watched in self.watched.values()}
        ordinal = next(n for n in range(1, len(taken) + 2) if n not in taken)
        if ordinal > OPTIMIZERS:
            self._log(f"only {OPTIMIZERS} optimizers are shown")
            return None
        self._retire({watched.label for watched in self.watched.values()})
        kind = type(optimizer).__name__
        label = kind if ordinal == 1 else f"#{ordinal}.{kind}"

        def store(group: int, norm: float) -> None:
            if group < self.shown.get(label, 0):  # the norm may come late from a device
                self.weight_norm.labels(label, str(group)).set(norm)

        watched = self.watched[id(optimizer)] = Watched(
            weakref.ref(optimizer), ordinal, label, Norms(self.context, store)
        )
        return watched

    def _known(self, optimizer: Optimizer) -> Watched | None:
        watched = self.watched.get(id(optimizer))
        return watched if watched is not None and watched.ref() is optimizer else None

    def _retire(self, living: set[str]) -> None:
        """Remove the series of optimizers that are gone."""
        for label in [label for label in self.shown if label not in living]:
            self._forget(label, 0)
            del self.shown[label]

    def _forget(self, label: str, groups: int) -> None:
        """Remove the series of groups that an optimizer no longer has."""
        for group in range(groups, self.shown.get(label, 0)):
            for gauge in (*self.gauges.values(), self.weight_norm):
                gauge.remove(label, str(group))

    def _log(self, text: str) -> None:
        if not self.is_reported:
            self.is_reported = True
            self.context.log(text)

    @hookimpl
    def unconfigure(self) -> None:
        """Release the optimizers."""
        self.watched.clear()


def settings(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the settings of a parameter group that are numbers, by the names of the metrics."""
    values = [(name, group.get(name)) for name in ("lr", "momentum", "weight_decay")]
    betas: Any = group.get("betas")
    if type(betas) in (tuple, list) and len(betas) >= 2:
        values += [("momentum", betas[0]), ("beta2", betas[1])]
    return [(name, value) for name, value in values if issubclass(type(value), (int, float, Tensor))]
