"""Measure the outputs, gradients and weights of modules, and report findings such as dead or exploding.

For the first floating-point tensor in the output of each module, as of the last sampled step:

    hookd_activations_mean{module}               of the finite elements, as the next four; NaN if there are none
    hookd_activations_std{module}                population standard deviation
    hookd_activations_min{module}
    hookd_activations_max{module}
    hookd_activations_absmax{module}             the largest magnitude
    hookd_activations_norm{module}               L2 norm of the finite elements
    hookd_activations_zero_ratio{module}         share of elements that are exactly 0; after a ReLU, the dead part
    hookd_activations_nonfinite_elements{module} number of elements that are NaN or infinite
    hookd_activations_saturation_ratio{module}   share of elements where the function is flat (Sigmoid, Tanh, GELU and
                                                 similar)
    hookd_activations_below_ratio{module,edge}   only with `histogram`: share of elements that are at most `edge`

For the parameters that a module itself owns, at the optimizer step (gradients are reduced over ranks and accumulated):

    hookd_activations_grad_norm{module}          L2 norm of their gradients
    hookd_activations_weight_norm{module}        L2 norm of the parameters
    hookd_activations_update_ratio{module}       |dw|/|w|: norm of the step's change over the norm of the parameters
    hookd_activations_grad_noise_ratio{module}   share of the gradients' energy that differs from step to step: 1 is
                                                 only noise, 0 only signal; x/(1-x) is the noise scale in batches
    hookd_activations_param_grad_{mean,std,absmax,norm,zero_ratio}{module,param}   only with `parameters=true`
    hookd_activations_param_{norm,update_ratio}{module,param}                      the same

    hookd_activations_total_grad_norm            L2 norm of all gradients that the step used, if all of their modules were
                                                 sampled; after clipping, if the training clips

For the argument of `torch.autograd.backward`, if it is a single number:

    hookd_activations_loss{backward}             of the first four backwards since the optimizer's step, counted from 0.
                                                 If each of n losses was divided by n (gradient accumulation), or each
                                                 sum over targets by the number of targets of all, only "0": their sum,
                                                 which is the mean that the trainer knows
    hookd_activations_cumulative_loss{backward}         the sum of these over all steps since the attach
    hookd_activations_losses_total{backward}     their number; the mean over an interval is the growth of the sum
                                                 divided by that of the number

    hookd_activations_finding{module,kind}       1 while a module shows the finding

A finding becomes an incident, once per module and kind, after `patience` samples in a row that show it:

    dead             99 % (`dead=0.99`) of a ReLU's output are 0, and as many of its units have never been anything else
                     (before 256 samples: all of its units)
    saturated        95 % (`saturated=0.95`) of the output of a Sigmoid, Tanh, GELU or similar lie where the function is
                     flat; not for an output that the model returns, because a confident classifier is not a fault
    vanishing        a module's gradient, per element, is below 1e-4 (`vanishing`) of the largest of the modules after
                     it, and below a hundredth of its own earlier median; or it is below 1e-7 of the largest
    exploding        the norm of all gradients is 100 times (`exploding`) the median of the last 32 samples, twice in a
                     row
    unchanged        trained parameters get no gradient in 20 samples (`unchanged`), or are as before despite gradients in 4 (a
                     fifth of that), while others learn; parameters that change in the steps between do not count
    batchnorm_eval   a BatchNorm whose weights an optimizer changes runs in eval mode whenever gradients are computed, in a
                     model that is in training mode
    loss_spike       a loss exceeds the last 64 by three times (`spike`) their range; checked in every step
    diverging        five losses in a row are larger than any of the 59 before, and ten times (`diverging`) their median;
                     checked in every step
    near_overflow    a float16 output is above half of the largest float16

Options: `modules=GLOB|GLOB` (names as in the label), `types=GLOB|GLOB` (names of classes), `depth=N` (deepest modules
to observe, the root is 0), `every=N` (one step in N), `rotate=true` (one module in each sampled step, in turn),
`parameters=true`, `gradients=false` (outputs only), `histogram=true`, `patience=N` and the thresholds above.

Limits: NaN and infinities are left out of the statistics (hookd_nan reports them), so that attention masks do not drown
the rest. Saturation and distribution use at most 65,536 elements, evenly spread; the update ratio the first 16,384 of
each parameter, the noise the first 4,096. Values on a device are known a step or two later. Only modules are recognized
as ReLU and similar: a function that is called directly has no name.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookd import (
    Context,
    Module,
    Plugin,
    Summary,
    groups_of,
    hookimpl,
    may_have_devices,
    of_tensor,
    originals_of,
    parameters_in,
    peek,
    tensors,
)
from hookd_activations import findings, outputs
from hookd_activations.loss import Loss
from hookd_activations.parameters import Parameters, Row, Standstill, by_module
from hookd_activations.selector import Selector

if TYPE_CHECKING:
    from collections.abc import Sequence

OUTPUT = {
    "mean": "Mean", "std": "Standard deviation", "min": "Smallest finite element", "max": "Largest finite element",
    "zero_ratio": "Share of zeros", "absmax": "Largest magnitude", "norm": "L2 norm",
    "nonfinite_elements": "Elements that are NaN or infinite",
}  # fmt: skip
OWN = {
    "grad_norm": "L2 norm of the gradients of the module's own parameters",
    "weight_norm": "L2 norm of the module's own parameters",
    "update_ratio": "Norm of the step's change of the module's own parameters over their norm",
    "grad_noise_ratio": "Share of the energy of the gradients that differs from step to step",
}
PARAMETER = {
    "param_grad_mean": "Mean of the parameter's gradient", "param_grad_std": "Standard deviation of its gradient",
    "param_grad_absmax": "Largest magnitude in its gradient", "param_grad_norm": "L2 norm of its gradient",
    "param_grad_zero_ratio": "Share of zeros in its gradient", "param_norm": "L2 norm of the parameter",
    "param_update_ratio": "Norm of the step's change of the parameter over its norm",
}  # fmt: skip
RECTIFIERS = ("ReLU", "ReLU6", "Threshold")
BATCH_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
ALERT_STEPS = 8
"""Steps sampled after a loss spike, whatever the interval: an explosion may be over within ten steps."""

Cells = tuple[Any, tuple[int, ...]]


Norm = tuple[Module, "weakref.ref[Any]", Optional[bool]]
"""A BatchNorm, its torch module, and whether it was in eval mode in all training calls (None: no such call yet)."""


class Activations(Plugin):
    """Samples the outputs of modules, and their parameters, in one step of ten."""

    name = "activations"
    sampled = ("forward", "output_summary", "root_forward")
    every = 10

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options and declare the metrics."""
        self.context = context
        self.selector = Selector(context)
        self.findings = findings.Findings(context)
        self.losses = findings.Losses(self.findings.spike)
        self.rates = findings.Raise()
        self.shown = Loss(context)
        self.growth: dict[str, findings.Course] = {}
        self.ratios: dict[str, findings.Course] = {}
        self.wants_gradients = context.option("gradients", default=True)
        self.wants_parameters = context.option("parameters", default=False)
        self.wants_histogram = context.option("histogram", default=False)
        sample = "at the last sampled step."
        gauges = {
            name: context.gauge(name, f"{of} of the output's first floating-point tensor {sample}", ["module"])
            for name, of in OUTPUT.items()
        }
        self.gauges = list(gauges.values())
        shown = {"nonfinite" if name == "nonfinite_elements" else name: gauge for name, gauge in gauges.items()}
        self.outputs = context.show_outputs(shown, zeros=self.findings.dead)
        self.own = [context.gauge(name, f"{of}, {sample}", ["module"]) for name, of in OWN.items()]
        self.total = context.gauge("total_grad_norm", f"L2 norm of all gradients that the optimizers used, {sample}")
        self.saturation = context.gauge(
            "saturation_ratio", f"Share of the output where the function is flat, {sample}", ["module"]
        )
        if self.wants_parameters:
            labels = ["module", "param"]
            self.each = [context.gauge(name, f"{of}, {sample}", labels) for name, of in PARAMETER.items()]
        if self.wants_histogram:
            text = f"Share of the output's elements that are at most `edge`, {sample}"
            self.below = context.gauge("below_ratio", text, ["module", "edge"])
        self.cells: dict[int, Cells] = context.per_module()
        self.units: dict[int, outputs.Units] = context.per_module()  # only for rectifiers that may be dead
        self.flat: dict[int, outputs.OutputMatcher] = {}  # outputs, in this call of the root, that can saturate
        self.placed: dict[int, bool] = context.per_module()  # of these: does the model return it?
        self.norms: dict[int, Norm] = context.per_module()
        self.parameters = Parameters(context, self.selector.selected, self._publish_step)
        self.is_sampled = False  # a module or an output was observed in this step
        self.alert = 0
        self.place = 0  # index of the next loss within its step
        self.arrived: list[tuple[int, float]] = []  # losses that are not judged yet, with their places
        self.optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self.trained: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()  # roots

    @hookimpl
    def select(self, module: Module) -> set[str]:
        """Select the modules that the options name, and `root_forward` for every root.

        If only the statistics of an output are needed, hookd publishes them itself, from C.
        """
        hooks = set() if module.depth else {"root_forward"}
        if self.selector.take(module):
            hooks.add("forward" if self._needs_output(module) else "output_summary")
        return hooks

    def _needs_output(self, module: Module) -> bool:
        is_plain = not (self.wants_histogram or self.selector.rotate) and self.context.shows_in_c
        return not is_plain or may_have_devices() or module.type in outputs.SATURATION or module.type in BATCH_NORMS

    # -- outputs

    @hookimpl
    def forward(self, module: Module, output: Any) -> None:
        """Compute the statistics of an output, and judge it."""
        self.is_sampled = True
        if not self.selector.is_due(module):
            return
        tensor = next(filter(self._is_real, tensors(output)), None)
        if tensor is None:
            return
        is_half, is_learning = tensor.dtype is torch.float16, tensor.requires_grad
        self.context.summary(tensor, lambda summary: self._publish_output(module, summary, is_half=is_half))
        if module.id in self.units:
            self._read([self.units[module.id].add(tensor)], lambda got: self._dead(module, *got))
        if module.type in outputs.SATURATION:
            self.flat[module.id] = outputs.OutputMatcher(tensor)
            is_much = tensor.numel() >= findings.FEW
            ratio = outputs.saturation_ratio(tensor, module.type)
            self._read([ratio], lambda got: self._saturated(module, *got, is_much=is_much))
        if self.wants_histogram:
            self._read([outputs.below_ratios(tensor)], lambda shares: self._publish_shares(module, shares))
        if module.type in BATCH_NORMS:
            self._check_mode(module, is_learning=is_learning)

    @hookimpl
    def output_summary(self, module: Module, output: Any, summary: Summary) -> None:
        """Judge an output that has or had many zeros, or that hookd does not publish from C."""
        tensor = next(filter(self._is_real, tensors(output)), None)
        if tensor is not None:
            self._judge(module, summary, is_half=tensor.dtype is torch.float16)
            if module.id in self.units:
                self._read([self.units[module.id].add(tensor)], lambda got: self._dead(module, *got))

    @hookimpl
    def root_forward(self, output: Any) -> None:
        """Note which outputs the model returns."""
        for number, place in self.flat.items():
            self.placed[number] = self.placed.get(number, False) or place.is_given_back(output)
        self.flat.clear()

    def _is_real(self, tensor: Tensor) -> bool:
        """Whether it is a dense tensor of real numbers; other kinds do not store the output's elements as such."""
        return self.context.is_readable(tensor) and tensor.is_floating_point()

    def _read(self, values: list[Tensor], then: Callable[[list[float]], None]) -> None:
        """Pass small tensors to `then`: at once from host memory, from a device when the copy has arrived."""
        if values[0].is_cpu:
            then([number for value in values for number in value.reshape(-1).tolist()])  # hookd: may block
        else:
            self.context.later(values, then)

    def _publish_output(self, module: Module, summary: Summary, *, is_half: bool) -> None:
        nonfinite = summary.nans + summary.infs
        values = (
            summary.mean, summary.std, summary.min, summary.max, summary.zero_ratio, summary.absmax, summary.norm,
            nonfinite,
        )  # fmt: skip
        cells, places = self._cells(module)
        for at, value in zip(places, values):
            cells[at] = value
        self._judge(module, summary, is_half=is_half)

    def _judge(self, module: Module, summary: Summary, *, is_half: bool) -> None:
        see = self.findings.see
        if module.type in RECTIFIERS and summary.count >= findings.FEW and summary.zero_ratio >= self.findings.dead:
            self.units.setdefault(module.id, outputs.Units())
        elif self.units.pop(module.id, None) is not None:
            see("dead", module.name, "", holds=False)
        if is_half:
            is_near = findings.HALF_LARGEST < summary.absmax < findings.LARGEST
            see("near_overflow", module.name, "{module}: an output of {absmax:.0f} in float16, whose largest number is 65504",
                holds=is_near, absmax=summary.absmax)  # fmt: skip

    def _cells(self, module: Module) -> Cells:
        cells = self.cells.get(module.id)
        if cells is None:
            children = [gauge.labels(module.name) for gauge in self.gauges]
            cells = self.cells[module.id] = children[0].cells, tuple([child.at for child in children])
        return cells

    def _dead(self, module: Module, ratio: float) -> None:
        self.findings.see(
            "dead", module.name, "{module} is dead: {dead_ratio:.1%} of its units have only ever output 0. Lower the learning rate, or use a LeakyReLU",
            holds=ratio >= self.findings.dead, dead_ratio=ratio,
        )  # fmt: skip

    def _saturated(self, module: Module, ratio: float, *, is_much: bool) -> None:
        is_inside = self.placed.get(module.id) is False  # unknown until the first call of the model has returned
        self.saturation.labels(module.name).set(ratio)
        self.findings.see(
            "saturated", module.name, "{module}: {saturation_ratio:.1%} of its output is saturated. Normalize its input, or initialize with less",
            holds=is_inside and is_much and ratio >= self.findings.saturated, saturation_ratio=ratio,
        )  # fmt: skip

    def _publish_shares(self, module: Module, shares: list[float]) -> None:
        for edge, share in zip(outputs.EDGES, shares):
            self.below.labels(module.name, f"{edge:g}").set(share)

    def _check_mode(self, module: Module, *, is_learning: bool) -> None:
        norm: Any = module.torch()
        if norm is None or not is_learning:
            return
        _, ref, was_eval = self.norms.get(module.id, (module, None, None))
        if ref is None or ref() is not norm:  # a recreated model has the names of the old one
            self.findings.see("batchnorm_eval", module.name, "", holds=False)
            ref, was_eval = weakref.ref(norm), None
        is_eval = peek(norm, "training") is False and peek(norm, "track_running_stats") is True and _is_in_train(module)
        self.norms[module.id] = module, ref, is_eval and was_eval is not False

    def _judge_modes(self, optimizer: Optimizer) -> None:
        """Judge the BatchNorms that an optimizer has changed.

        Gradients in eval mode alone are not enough: they may be those of an adversarial attack on the inputs.
        """
        stepped = {id(p) for group in groups_of(optimizer) for p in group["params"] if of_tensor(p, "grad") is not None}
        for number, (module, ref, is_eval) in list(self.norms.items()):
            norm = ref()
            if is_eval is not None and norm is not None and _is_in(stepped, norm):
                self.norms[number] = module, ref, None
                self.findings.see(
                    "batchnorm_eval",
                    module.name,
                    "{module}: a BatchNorm in eval mode is being trained. Call train() on it, or freeze its parameters",
                    holds=is_eval,
                )

    # -- the loss

    @hookimpl
    def loss(self, tensors: tuple[Any, ...]) -> None:
        """Publish the loss and look for a spike.

        Only a single number is a loss; a backward may also start from other tensors.
        """
        place, self.place = self.place, self.place + 1
        value = self.context.number(tensors[0]) if len(tensors) == 1 else None
        is_awaited = value is None and len(tensors) == 1 and self._is_real(tensors[0]) and tensors[0].numel() == 1
        if value is None and not is_awaited:
            return
        arrived = self.shown.begin(tensors[0])

        def take(loss: float) -> None:
            arrived(loss)
            self.arrived.append((place, loss))

        if value is not None:
            take(value)
        else:
            self._read([tensors[0].detach().reshape(1)], lambda got: take(*got))

    def _judge_losses(self) -> None:
        """Judge the losses that have arrived since the last optimizer."""
        arrived, self.arrived = self.arrived, []
        for place, value in arrived:
            self._judge_loss(place, value)

    def _begin_anew_with(self, optimizer: Optimizer) -> None:
        """Forget losses and gradients when another model is trained, as in a search or a cross-validation."""
        if self.optimizers.get(id(optimizer)) is optimizer:
            return
        self.optimizers[id(optimizer)] = optimizer
        first = next((p for group in groups_of(optimizer) for p in group["params"]), None)
        roots = (root for _, root in self.context.models())
        model = next((root for root in roots if any(p is first for _, p in parameters_in(root))), None)
        if model is not None and self.trained.get(id(model)) is not model:
            self.trained[id(model)] = model
            self.losses.forget()
            self.arrived.clear()
            self.growth.clear()
            self.ratios.clear()

    def _judge_loss(self, place: int, value: float) -> None:
        is_spike = self.losses.is_spike(place, value)
        if is_spike:
            self.alert = ALERT_STEPS
        rise = self.rates.before(self.context.step)
        self.findings.see(
            "loss_spike", "", "the loss jumped to {loss:.4g}" + (
                f" after the learning rate rose from {rise[0]:g} to {rise[1]:g}. Raise it more slowly, or less" if rise else
                ". Look at the data of this step; if they are as usual, lower the learning rate, or clip the gradients"
            ),
            holds=is_spike, patience=1, loss=value,
        )  # fmt: skip
        growth = self.losses.growth(place)
        self.findings.see(
            "diverging", "", "the loss diverges: it is {loss:.4g}, and for several steps it has been {growth:.0f} times the median "
            "of the steps before. Lower the learning rate, or clip the gradients",
            holds=growth >= self.findings.diverging, patience=1, loss=value, growth=growth,
        )  # fmt: skip

    # -- parameters

    @hookimpl
    def step_pre(self, optimizer: Optimizer) -> None:
        """Sample gradients and weights in a step whose outputs were sampled, and after a spike."""
        self._begin_anew_with(optimizer)
        self._judge_losses()
        groups = peek(optimizer, "param_groups")
        if type(groups) is list and groups and type(groups[0]) is dict:
            self.rates.take(id(optimizer), groups[0].get("lr"), self.context.step)
        self.is_sampled = self.outputs.has_looked() or self.is_sampled
        if self.wants_gradients and (self.is_sampled or self.alert):
            self.parameters.before(optimizer, self.selector.is_due)

    @hookimpl
    def step_post(self, optimizer: Optimizer) -> None:
        """Measure the effect of the step."""
        self.parameters.after(optimizer)
        if self.is_sampled and self.norms:
            self._judge_modes(optimizer)

    @hookimpl
    def step_done(self) -> None:
        """End the step."""
        self._judge_losses()  # of a training without an optimizer
        self.parameters.end()
        self.shown.end_step()
        self.place = 0
        self.placed.update({number: self.placed.get(number, False) for number in self.flat})  # not in a root's call
        self.flat.clear()
        for text in self.selector.complaints():
            self.context.incident("option", f"activations: {text}")
        self.alert = max(0, self.alert - 1)
        if self.outputs.has_looked() or self.is_sampled:
            self.is_sampled = False
            self.selector.next()

    def _publish_step(self, optimizers: frozenset[int], rows: list[Row], total: float | None) -> None:
        """Publish and judge the results of these optimizers in one step; `total` is the norm of all their gradients."""
        if total is not None:
            self.total.labels().set(total)
        groups = by_module(rows)
        norms: dict[str, float] = {}
        for name, own in groups.items():
            norms[name] = self._publish(name, own)
            if self.wants_parameters:
                self._publish_each(own)
        self._judge_depth(groups, norms)
        self._judge_growth(optimizers, norms)
        self._judge_change(groups)

    def _publish(self, module: str, rows: list[Row]) -> float:
        grad = math.hypot(*(row.grad.norm for row in rows if row.grad is not None))
        weight = math.hypot(*(row.weight.norm for row in rows if row.weight is not None))
        before, energy = math.hypot(*(row.before for row in rows)), sum(row.energy for row in rows)
        update = math.hypot(*(row.moved for row in rows)) / before if before else 0.0
        values = [grad, weight, update]
        if energy:  # from the second sample on
            values.append(sum(row.noise for row in rows) / energy)
        for gauge, value in zip(self.own, values):
            gauge.labels(module).set(value)
        return grad

    def _publish_each(self, rows: list[Row]) -> None:
        for row in rows:
            if row.is_stepped and row.grad is not None and row.weight is not None:
                grad = row.grad
                values = (
                    grad.mean,
                    grad.std,
                    grad.absmax,
                    grad.norm,
                    grad.zero_ratio,
                    row.weight.norm,
                    row.update_ratio,
                )
                for gauge, value in zip(self.each, values):
                    gauge.labels(row.module, row.name).set(value)

    def _judge_depth(self, groups: dict[str, list[Row]], norms: dict[str, float]) -> None:
        """Compare each module's gradient, per element, with the largest of those after it, from the loss backwards."""
        largest, modules, was_known, new = 0.0, list(groups), self.findings.holds("vanishing"), []
        for depth in range(len(modules) - 1, -1, -1):
            name = modules[depth]
            elements = sum(row.elements for row in groups[name] if row.is_stepped or row.grad is not None)
            size = norms[name] / math.sqrt(max(1, elements))
            ratio, course = size / largest if largest else 1.0, self.ratios.setdefault(name, findings.Course())
            has_faded = course.relative(ratio) < findings.FADED or ratio < findings.UNSEEN * self.findings.vanishing
            holds = 0 < ratio < self.findings.vanishing and has_faded
            if not holds:
                course.take(ratio)
            if self.findings.note("vanishing", name, holds=holds):
                new.append((ratio, depth, name))
            largest = max(largest, size)
        if new and not was_known:  # the gradient of a module before it vanishes for the same reason
            ratio, depth, name = min(new)
            more = f"; so do those of {len(new) - 1} other modules" if len(new) > 1 else ""
            self.findings.report(
                "vanishing", name, "{module}: its gradient vanishes: {ratio:.1e} of the gradient of a module after it" + more + ". Use ReLU or GELU, normalization, or residual connections",
                ratio=ratio, depth=depth, modules=len(modules),
            )  # fmt: skip

    def _judge_growth(self, optimizers: frozenset[int], norms: dict[str, float]) -> None:
        """Compare with earlier steps, and name the module that grew most."""
        courses = [self.growth.setdefault(name, findings.Course()) for name in (f"#{hash(optimizers)}", *norms)]
        values = [math.hypot(*norms.values()), *norms.values()]
        total, *factors = (course.relative(value) for course, value in zip(courses, values))
        for course, value in zip(courses, values):
            course.take(value)
        worst = max(zip(factors, norms))[1]
        place = list(norms).index(worst)
        holds = total > self.findings.exploding and not self.selector.rotate
        self.findings.see(
            "exploding", "", "the gradients exploded, most of all in {worst}: their norm is {factor:.0f} times its recent median. Clip them, or lower the learning rate",
            holds=holds, patience=2, factor=total, worst=worst, depth=place, modules=len(norms),
        )  # fmt: skip

    def _judge_change(self, groups: dict[str, list[Row]]) -> None:
        """Find modules that do not learn although others do, and although no other finding explains it."""
        reasons = {name: _standstill(rows) for name, rows in groups.items()}
        is_explained = self.findings.holds("dead") or self.findings.holds("saturated")
        can_tell = any(row.moved for rows in groups.values() for row in rows) and not is_explained
        new: dict[Standstill, list[str]] = {}
        for name, reason in reasons.items():
            holds = reason is not None and can_tell
            weight = reason.weight if reason is not None else 1
            if (
                self.findings.note("unchanged", name, holds=holds, patience=self.findings.unchanged, weight=weight)
                and reason is not None
            ):
                new.setdefault(reason, []).append(name)
        for reason, names in new.items():
            self.findings.report_all("unchanged", names, "{modules}: " + reason.text)

    @hookimpl
    def unconfigure(self) -> None:
        """Release the tensors at once."""
        # This object is part of a reference cycle, which only a full garbage collection would free.
        self.parameters.clear()
        self.units.clear()
        self.flat.clear()


def _standstill(rows: Sequence[Row]) -> Standstill | None:
    """Return why none of a module's parameters changes, the surest of their reasons; None if one does."""
    reasons = [row.standstill for row in rows]
    known = [reason for reason in reasons if reason is not None]
    return max(known, key=lambda reason: reason.weight) if known and len(known) == len(reasons) else None


def _is_in_train(module: Module) -> bool:
    """Whether the root of a module is in training mode; hookd_learning reports a model that is in `eval()` as a whole."""
    while module.parent is not None:
        module = module.parent
    root = module.torch()
    return root is not None and peek(root, "training") is not False


def _is_in(ids: set[int], norm: nn.Module) -> bool:
    """Whether the weight of a BatchNorm, or a parameter that it is computed from, has one of these ids."""
    return any(id(tensor) in ids for tensor in originals_of(norm, "weight"))
