"""Clip gradients in a training that does not clip them, or measure what clipping would do.

    hookd_gradclip_norm                  the number that is compared with the limit, before clipping: the norm (mode
                                         value: the largest magnitude; modes param and module: the largest norm of the
                                         step; mode agc: the largest ratio of a unit's gradient to its weights)
    hookd_gradclip_scale                 the (smallest) factor of the step; 1 if nothing was clipped; not in mode value
    hookd_gradclip_clipped_total{mode}   how often something was clipped, or would have been in a dry run:
                                         optimizer steps, and in mode module gradients
    hookd_gradclip_nonfinite_total       steps, or gradients, with a NaN or an infinity, which are never clipped
    hookd_gradclip_skipped_total         steps from which such gradients were removed (`nonfinite=skip`)

Modes (`mode=...`):
- norm (the default): the norm of all gradients that the optimizer is about to use is at most `max_norm`. The result is
  bit for bit that of `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)` before the step.
  `order=optimizer` sums in the order of the optimizer's groups instead of the model's, which gives other bits.
- value: each element lies within +-`clip_value`, as with `torch.nn.utils.clip_grad_value_`.
- param: the norm of each parameter's gradient is at most `max_norm`, as with `clip_grad_norm_` of each parameter alone.
- agc: adaptive gradient clipping (arXiv:2102.06171, see `rules.ByUnit`). The norm of each unit's gradient is at most
  `clip_factor` times the norm of its weights, or times `eps` (0.001) if that is larger. The paper excludes the last
  linear layer: `exclude=fc.*`.
- module: each gradient that flows from a module into one of its inputs has a norm of at most `max_norm`, bit for bit as
  with a full backward hook. `modules=GLOB|GLOB` selects the modules. If a tensor is passed in twice (self-attention),
  the sum of its gradients is clipped, whereas torch's hook sees each. This is not the same as clipping the gradients of
  parameters.
`exclude=GLOB|GLOB` excludes the parameters with these names, in all modes but module.

`dry_run=true` measures and changes nothing; it is the default if no setting is given at all. With a GradScaler the limits
apply to the unscaled gradients, also with fused optimizers (but not in mode module, which sees scaled gradients).
Gradients are accumulated before they are clipped. If an optimizer's gradients come from a closure (LBFGS), they are
clipped at the end of each closure, where one would write it by hand. Each optimizer is clipped separately. Sparse
gradients are clipped as dense ones with the same values.

In a job of several ranks, clipping begins, changes and ends on all ranks at the same step. With DistributedDataParallel
all ranks then have the same gradients. Gradients of `fully_shard` (FSDP2) are clipped by the norm of the whole in modes
norm, value and param: the ranks add up their parts, as in torch's own function. A dry run and mode agc are refused.
FSDP1 is only supported in mode value. Shards that are plain tensors (Megatron's tensor parallelism) cannot be
recognized: each rank would clip by the norm of its own part.

Non-finite gradients are never clipped, because a clipped infinity would silently become zero or NaN. A step that has one
is left as it is (`nonfinite=leave`). With `nonfinite=skip` the optimizer gets no gradients at all in that step
(`.grad = None`; zeros would still move Adam), and each step waits for the device. A GradScaler skips such steps by
itself. The norm is then shown as NaN. The norm is infinity if all elements are finite, but their norm is too large for
its dtype: that gradient is clipped to 0, as by torch's function.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from hookd import Context, Module, Plugin, PluginError, groups_of, hookimpl, of_tensor, peek
from hookd_gradclip import rules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

MODES = {
    "norm": ("max_norm", "norm_type", "order", "exclude", "nonfinite"),
    "value": ("clip_value", "exclude", "nonfinite"),
    "param": ("max_norm", "norm_type", "exclude", "nonfinite"),
    "agc": ("clip_factor", "eps", "exclude", "nonfinite"),
    "module": ("max_norm", "norm_type", "modules"),
}
"""The settings of each mode, the limit first."""
SETTINGS = {"mode"}.union(*MODES.values())
FOREIGN = SETTINGS - {"mode"}
"""Settings that belong to some modes only."""
LIMITS = {"max_norm": 1.0, "clip_value": 1.0, "clip_factor": 0.01}
"""The settings that are limits, with usual values, which a dry run uses by default."""
LOOKED_AT_STEPS = 20
"""Number of optimizer steps after which a pattern that has matched nothing is reported."""


class GradClip(Plugin):
    """Clips by global norm, by value, parameter by parameter, by AGC, or module by module."""

    name = "gradclip"
    mutates = True

    @classmethod
    def changed(cls, options: dict[str, str], given: dict[str, str]) -> dict[str, str]:
        """Return the options after a change; a new mode drops settings of the old one that it does not have."""
        after = super().changed(options, given)
        own = MODES.get(after.get("mode", "norm"), SETTINGS)
        return {name: text for name, text in after.items() if name in given or name in own or name not in FOREIGN}

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options.

        Raises:
            PluginError: a limit is missing or not positive, or a setting belongs to another mode.
        """
        self.context = context
        option = context.option
        if "every" in context.options:
            raise PluginError("gradclip: every step is checked, so there is no option every")
        self.mode = option("mode", "norm", tuple(MODES))
        self.dry_run = option("dry_run", SETTINGS.isdisjoint(context.options))
        self.mutates = not self.dry_run
        self.max_errors = self.longest = 1  # also for a dry run, which cannot go on without a norm
        self.limit = self._limit()
        self.norm_type = self._positive("norm_type", 2.0)
        self.order = option("order", "model", ("model", "optimizer"))
        self.nonfinite_policy = option("nonfinite", "leave", ("leave", "skip"))
        self.modules, self.excluded = context.globs("modules"), context.globs("exclude", "")
        self.rule = self._rule(self._positive("eps", 1e-3, finite=True))
        self._refuse_foreign_settings()
        self._declare(context)
        self.largest = 0.0  # of the norms of this step, in mode module
        self.steps = 0

    def _declare(self, context: Context) -> None:
        self.norm = context.gauge("norm", "Norm of the gradients before clipping.")
        self.scale = context.gauge("scale", "Factor that the gradients were multiplied by.")
        self.clipped = context.counter("clipped", "Clips, including those of a dry run.", ["mode"])
        self.nonfinite = context.counter("nonfinite", "Steps with non-finite gradients, which are not clipped.")
        self.skipped = context.counter("skipped", "Steps from which non-finite gradients were taken out.")
        self.clipped_here = self.clipped.labels(self.mode)
        for counter in (self.clipped_here, self.nonfinite, self.skipped):
            counter.inc(0)

    def _limit(self) -> float:
        limits = {name: self.context.option(name, 0.0) for name in LIMITS}
        given, name = self.context.options, MODES[self.mode][0]
        if self.dry_run and name not in given:
            return LIMITS[name]
        if not 0 < limits[name] < math.inf:
            other = {"clip_value": "value", "clip_factor": "agc"}
            meant = [f"mode={other[one]}" for one in other if one in given and "mode" not in given]
            hint = meant[0] if meant and name not in given else f"{name}={LIMITS[name]}"
            now = f", not {limits[name]:g}" if name in given else ""
            raise PluginError(f"gradclip: mode={self.mode} needs a positive and finite {name}{now}", hint=hint)
        return limits[name]

    def _positive(self, name: str, default: float, *, finite: bool = False) -> float:
        value = self.context.option(name, default)
        if not value > 0 or (finite and value == math.inf):
            what = "positive and finite" if finite else "positive"
            raise PluginError(f"gradclip: {name} must be {what}, not {value:g}")
        return value

    def _rule(self, eps: float) -> rules.Rule:
        if self.mode == "value":
            return rules.ByValue(self.limit)
        if self.mode == "agc":
            return rules.ByUnit(self.limit, eps)
        return (rules.ByParameter if self.mode == "param" else rules.ByNorm)(self.limit, self.norm_type)

    def _refuse_foreign_settings(self) -> None:
        own = MODES[self.mode]
        for name in self.context.options:
            if name in FOREIGN.difference(own):
                raise PluginError(f"gradclip: mode={self.mode} has no {name}", hint=f"it has: {', '.join(own)}")

    @hookimpl
    def select(self, module: Module) -> bool:
        """Select modules in mode module only, because their events put hooks on the autograd graph."""
        return self.mode == "module" and self.modules.match(module.name)

    @hookimpl
    def backward(self, grad_input: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Scale each gradient that leaves the module."""
        norms = [None if g is None or not self._is_there(g) else self._norm(g.detach()) for g in grad_input]
        for norm in norms:
            if norm is not None:
                self._measured(norm)
        if self.dry_run:
            return None
        pairs = zip(grad_input, norms)
        return tuple(g if n is None else g * rules.factor(n, self.limit).to(g.dtype) for g, n in pairs)

    def _norm(self, grad: Tensor) -> Tensor:
        return rules.nan_if_bad([grad], rules.vector_norm(grad, self.norm_type))

    @hookimpl
    def step_pre(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Clip the gradients that the optimizer is about to use."""
        self.steps += 1
        if self.steps == LOOKED_AT_STEPS:
            for text in self.modules.unmatched("module") + self.excluded.unmatched("parameter"):
                self.context.incident("option", f"gradclip: {text}")
        if self.mode == "module":
            self._publish(self.largest)
            self.largest = 0.0
        elif not has_closure:
            self._clip(optimizer)

    @hookimpl
    def closure_done(self, optimizer: Optimizer) -> None:
        """Clip the gradients that a closure has computed inside the optimizer's step."""
        if self.mode != "module":
            self._clip(optimizer)

    def _parameters(self, optimizer: Optimizer) -> Iterator[Parameter]:
        for name, parameter in self.context.ordered_parameters(optimizer):
            if not self.excluded.match(name) and of_tensor(parameter, "grad") is not None:
                yield parameter

    def _ordered(self, optimizer: Optimizer) -> list[Parameter]:
        parameters = list(self._parameters(optimizer))
        if self.order == "model":
            return parameters
        chosen = {id(parameter) for parameter in parameters}
        return [p for group in groups_of(optimizer) for p in group["params"] if id(p) in chosen]

    @torch.no_grad()
    def _clip(self, optimizer: Optimizer) -> None:
        gradients = [rules.gradient_of(parameter, changes=not self.dry_run) for parameter in self._ordered(optimizer)]
        gradients = [one for one in gradients if self._is_there(one.grad) and self._is_there(one.weight)]
        if not gradients:
            return
        self._require_whole(gradients)
        self._require_real(gradients, optimizer)
        scale = peek(optimizer, "grad_scale")  # a fused optimizer will divide by it
        norm = self.rule.judged(gradients, self.rule.measure(gradients, scale))
        self._measured(norm)
        if self.dry_run:
            return
        if self.nonfinite_policy == "skip" and scale is None and norm.isnan().item():  # hookd: may block
            self._remove_gradients(optimizer)
        else:  # a NaN counts as 0, so that nothing is clipped; this does not wait for a device
            self.rule.clip(gradients, torch.where(norm.isnan(), 0.0, norm), scale)

    def _is_there(self, tensor: Tensor) -> bool:
        """Whether a tensor has elements and its memory is not freed; subclasses are only checked for elements."""
        return bool(tensor.numel()) and (type(tensor) is not torch.Tensor or self.context.is_readable(tensor))

    def _require_whole(self, gradients: list[rules.Gradient]) -> None:
        """Refuse gradients with parts in other ranks if the whole must be known.

        Raises:
            PluginError: the gradients are sharded, and the mode or a dry run does not support that.
        """
        if any(rules.is_sharded(one.grad) for one in gradients):
            if self.dry_run:
                raise PluginError("gradclip: a dry run cannot measure sharded gradients: all ranks together would have to"
                                  " compute the norm")  # fmt: skip
            if self.mode == "agc":
                raise PluginError("gradclip: mode=agc cannot be used with sharded gradients")
        if self.mode != "value" and any(peek(one.parameter, "_fsdp_flattened") for one in gradients):
            raise PluginError(
                "gradclip: with FullyShardedDataParallel (FSDP1) no rank knows the norm; use fully_shard or mode=value"
            )

    def _require_real(self, gradients: list[rules.Gradient], optimizer: Optimizer) -> None:
        """Refuse complex gradients before any element is clamped, because complex numbers have no order.

        Raises:
            PluginError: mode value would clamp a complex gradient.
        """
        if self.mode == "value" and not self.dry_run:
            odd = {id(one.parameter) for one in gradients if one.grad.is_complex()}
            names = (name for name, parameter in self.context.ordered_parameters(optimizer) if id(parameter) in odd)
            for name in names:
                raise PluginError(
                    f"gradclip: mode=value cannot clamp the complex gradient of {name}; no gradient was changed",
                    hint=f"exclude={name}, or mode=norm, which scales gradients",
                )

    def _remove_gradients(self, optimizer: Optimizer) -> None:
        self.skipped.inc()
        for group in groups_of(optimizer):
            for parameter in group["params"]:
                parameter.grad = None

    def _measured(self, norm: Tensor) -> None:
        if rules.on_host(norm):
            self._record(norm.item())  # hookd: may block
        else:
            self.context.later([norm], lambda numbers: self._record(numbers[0]))

    def _record(self, norm: float) -> None:
        if math.isnan(norm):
            self.nonfinite.inc()
        elif norm > self.limit:
            self.clipped_here.inc()
        if self.mode == "module":
            self.largest = max(self.largest, norm)
        else:
            self._publish(norm)

    def _publish(self, norm: float) -> None:
        self.norm.set(norm)
        if self.mode != "value":
            eps = 0.0 if self.mode == "agc" else rules.EPS
            self.scale.set(min(1.0, self.limit / (norm + eps)) if norm > 0 else 1.0)
