"""The rules of hookd_gradclip's modes: what each measures and changes.

A rule measures one number per step, as a 0-dim tensor on the device of the gradients. It clips only if this number
exceeds the limit. No code here reads a value on a device, so none waits for one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import utils

from hookd import of_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Parameter

EPS = 1e-6
"""As in torch/nn/utils/clip_grad.py, 2.13: the limit is divided by (norm + 1e-6)."""


class Gradient(NamedTuple):
    """A gradient that an optimizer is about to use.

    Attributes:
        parameter: its parameter.
        grad: its values; for a sparse gradient those of its rows, each row once.
        weight: the parameter's values at the same positions.
    """

    parameter: Parameter
    grad: Tensor
    weight: Tensor


def gradient_of(parameter: Parameter, *, changes: bool) -> Gradient:
    """Return a parameter's gradient with its weights.

    Args:
        parameter: a parameter with a gradient.
        changes: the values will be changed, so a sparse gradient with duplicate rows is replaced by a coalesced one.
    """
    grad = of_tensor(parameter, "grad")  # bypasses a `grad` that a class of parameters defines
    assert grad is not None
    weight = Tensor.detach(parameter)
    if not grad.is_sparse:
        return Gradient(parameter, Tensor.detach(grad), weight)
    whole = Tensor.detach(grad).coalesce()
    if changes:
        parameter.grad = whole
    places = whole.indices()
    return Gradient(parameter, whole.values(), weight[tuple(places)])


class Rule:
    """The measurement and the change of one mode.

    Args:
        limit: upper limit of what `measure` returns.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def measure(self, gradients: Sequence[Gradient], scale: Tensor | None) -> Tensor:
        """Return the number that is compared with the limit, for gradients that the optimizer will divide by `scale`."""
        raise NotImplementedError

    def clip(self, gradients: Sequence[Gradient], measured: Tensor, scale: Tensor | None) -> None:
        """Reduce gradients above the limit to it; `measured` is the result of `measure`, or 0 to change nothing."""
        raise NotImplementedError

    def judged(self, gradients: Sequence[Gradient], measured: Tensor) -> Tensor:
        """Return `measured`, or NaN if an element is not finite; infinity then means that the norm overflowed."""
        return nan_if_bad([one.grad for one in gradients], measured)


class ByNorm(Rule):
    """The norm of all gradients together, as `torch.nn.utils.clip_grad_norm_`."""

    def __init__(self, limit: float, norm_type: float) -> None:
        super().__init__(limit)
        self.norm_type = norm_type

    def measure(self, gradients: Sequence[Gradient], scale: Tensor | None) -> Tensor:
        """Return the norm."""
        return unscaled(total_norm([one.grad for one in gradients], self.norm_type), scale)

    def clip(self, gradients: Sequence[Gradient], measured: Tensor, _scale: Tensor | None) -> None:
        """Scale all gradients by the same factor."""
        scale_down(gradients, self.limit, measured)


class ByValue(Rule):
    """The largest magnitude, as `torch.nn.utils.clip_grad_value_`."""

    def measure(self, gradients: Sequence[Gradient], scale: Tensor | None) -> Tensor:
        """Return the largest magnitude."""
        return unscaled(magnitude([one.grad for one in gradients]), scale)

    def clip(self, gradients: Sequence[Gradient], measured: Tensor, scale: Tensor | None) -> None:
        """Clamp all elements."""
        if is_within(measured, self.limit):
            return
        bound = torch.where(measured > self.limit, self.limit, math.inf)
        bound = bound if scale is None else bound * scale.to(bound.device)
        for _, grad, _ in gradients:
            own = bound.to(grad.device, grad.dtype)
            local(grad).clamp_(min=-own, max=own)

    def judged(self, _gradients: Sequence[Gradient], measured: Tensor) -> Tensor:
        """Return `measured`, or NaN for infinity: a magnitude cannot overflow."""
        return torch.where(measured.isfinite(), measured, math.nan)


class ByParameter(Rule):
    """The norm of each parameter's gradient separately."""

    def __init__(self, limit: float, norm_type: float) -> None:
        super().__init__(limit)
        self.norm_type = norm_type
        self._norms: list[Tensor] = []

    def measure(self, gradients: Sequence[Gradient], scale: Tensor | None) -> Tensor:
        """Return the largest of the norms."""
        self._norms = [unscaled(total_norm([one.grad], self.norm_type), scale) for one in gradients]
        return largest(self._norms)

    def clip(self, gradients: Sequence[Gradient], measured: Tensor, _scale: Tensor | None) -> None:
        """Scale each gradient separately."""
        for one, norm in zip(gradients, self._norms):
            own = torch.where(measured.to(norm.device) > 0, norm, 0.0)
            scale_down([one], self.limit, own)


class ByUnit(Rule):
    """Adaptive gradient clipping: the ratio of the gradient's norm to the weight's, for each unit.

    Source: A. Brock, S. De, S. L. Smith, K. Simonyan, High-Performance Large-Scale Image Recognition Without
    Normalization, arXiv:2102.06171, section 4.1. For a unit with weights W and gradients G, in the Frobenius norm: if
    |G| / max(|W|, eps) exceeds the clipping factor, G becomes factor * max(|W|, eps) / |G| * G. A unit is a row: all
    weights of one output. A tensor with a single axis (a bias, a gain) is one unit.
    """

    def __init__(self, limit: float, eps: float) -> None:
        super().__init__(limit)
        self.eps = eps
        self._ratios: list[Tensor] = []

    def measure(self, gradients: Sequence[Gradient], scale: Tensor | None) -> Tensor:
        """Return the largest ratio of all units."""
        units = [(unit_norm(one.grad), unit_norm(one.weight).clamp(min=self.eps)) for one in gradients]
        self._ratios = [unscaled(grad, scale) / weight for grad, weight in units]
        return largest([ratio.amax() for ratio in self._ratios])

    def clip(self, gradients: Sequence[Gradient], measured: Tensor, _scale: Tensor | None) -> None:
        """Scale the gradients of each unit separately."""
        if is_within(measured, self.limit):
            return
        for (_, grad, _), ratio in zip(gradients, self._ratios):
            exceeds = (ratio > self.limit) & (measured.to(ratio.device) > self.limit)
            grad.mul_(torch.where(exceeds, self.limit / ratio, 1.0).to(grad.dtype))


def unscaled(measured: Tensor, scale: Tensor | None) -> Tensor:
    """Divide by a loss scale; without one the bits stay the same."""
    return measured if scale is None else measured / scale.to(measured.device)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor (torch 2.0 to 2.14), with parts in other ranks."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which shares its memory."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def whole(norm: Tensor) -> Tensor:
    """Return a norm that every rank knows; for sharded gradients by a collective, as in `clip_grad_norm_`."""
    known: Tensor = norm.full_tensor() if is_sharded(norm) else norm  # type: ignore[attr-defined]
    return known


def on_host(tensor: Tensor) -> bool:
    """Whether reading a value of `tensor` costs nothing."""
    return tensor.is_cpu


def is_within(measured: Tensor, limit: float) -> bool:
    """Whether a measurement is known, without waiting for a device, to be within the limit."""
    return on_host(measured) and not measured.item() > limit


def unit_norm(tensor: Tensor) -> Tensor:
    """Return the norm of each row, in a shape that broadcasts with the tensor; float32 or wider."""
    dtype = wide(tensor)
    rows = tuple(range(1, tensor.dim())) if sum(size > 1 for size in tensor.shape) > 1 else tuple(range(tensor.dim()))
    norm: Tensor = torch.linalg.vector_norm(tensor, 2.0, dim=rows or None, keepdim=True, dtype=dtype)
    return norm


def wide(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype to sum in if the tensor's own is narrow, else None.

    In float16, for example, the norm of 70,000 ones would be infinite.
    """
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None


def largest(values: Sequence[Tensor]) -> Tensor:
    """Return the largest of 0-dim tensors; NaN if one of them is."""
    first = values[0]
    return torch.stack([value.to(first.device, first.dtype) for value in values]).amax()


def total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients as one vector, like the first half of `clip_grad_norm_`."""
    if hasattr(utils, "get_total_norm"):
        return whole(utils.get_total_norm(grads, norm_type))
    norms = [torch.linalg.vector_norm(g, norm_type).to(grads[0].device) for g in grads]  # torch < 2.6
    return whole(torch.linalg.vector_norm(torch.stack(norms), norm_type))


def magnitude(grads: list[Tensor]) -> Tensor:
    """Return the largest magnitude of all elements, NaN if one is: the norm for p = inf, in a seventh of the time."""
    if any(is_sharded(grad) or grad.is_complex() for grad in grads):
        return total_norm(grads, math.inf)
    return largest([bound.abs() for grad in grads for bound in torch.aminmax(grad)])


def scale_down(gradients: Sequence[Gradient], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients to `max_norm` if their `norm` is larger, like the second half of `clip_grad_norm_`.

    A norm of 0 scales nothing; with torch's function it would if the limit is below EPS.
    """
    if hasattr(utils, "clip_grads_with_norm_") and max_norm >= EPS and not any(_is_sparse(one) for one in gradients):
        utils.clip_grads_with_norm_([one.parameter for one in gradients], max_norm, norm)
        return
    coefficient = torch.where(norm > 0, (max_norm / (norm + EPS)).clamp(max=1.0), 1.0)
    for _, grad, _ in gradients:  # sparse, or torch < 2.6
        grad.mul_(coefficient.to(grad.device))


def _is_sparse(gradient: Gradient) -> bool:
    return gradient.parameter.grad is not None and gradient.parameter.grad.is_sparse


def vector_norm(grad: Tensor, norm_type: float) -> Tensor:
    """Return the norm of one gradient, [] float32 or wider."""
    norm: Tensor = torch.linalg.vector_norm(grad.detach(), norm_type, dtype=wide(grad))
    return norm


def nan_if_bad(grads: list[Tensor], norm: Tensor) -> Tensor:
    """Return the norm, or NaN if an element is not finite; infinity then means that the norm overflowed."""
    if not on_host(norm):  # a few launches for all gradients; if this misses a NaN, the norm is already NaN
        return torch.where(total_norm(grads, math.inf).isfinite(), norm, math.nan)
    return torch.where(magnitude(grads).isfinite(), norm, math.nan) if norm.isinf().item() else norm


def factor(norm: Tensor, limit: float) -> Tensor:
    """Return the factor that brings a gradient of this norm to the limit: at most 1, and 1 for a NaN norm."""
    return torch.where(norm.isnan(), 1.0, (limit / (norm + EPS)).clamp(max=1.0))
