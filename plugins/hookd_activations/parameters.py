"""Measure the gradients, weights and updates of parameters at an optimizer step.

The statistics of gradients and weights cover all elements. The update is measured on the first SLICE elements of each
parameter, copied before the step, and the noise on the first NOISE_SLICE of its gradient, so that no model needs memory
for a second copy of itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch import Tensor

from hookd import Context, Module, Summary, groups_of, of_tensor, owner_of, parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.optim import Optimizer

SLICE = 1 << 14
NOISE_SLICE = 1 << 12
_grad: Any = Tensor.grad.__get__  # type: ignore[union-attr]  # bypasses overrides in parameter subclasses
_requires_grad: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
SURE = 1e-6
"""Relative size of an update that changes the norm of a parameter for sure."""
DECAY = 0.9
"""Decay of the mean gradient, per sampled step."""


Key = tuple[str, str]
"""A parameter: the name of its module, and its own name there."""
Request = tuple[list[Tensor], Callable[[float, float], None], "Row"]
"""Two numbers, each [], the function that takes them once they can be read, and the row that they are for."""


class Standstill(Enum):
    """Why a parameter does not change: what is wrong, and what to look for.

    Attributes:
        weight: number of samples that one with this reason counts as. Modules that only some batches need have no gradient in many
            samples; nothing of a training that learns looks like the other two.
    """

    NO_GRADIENT = 1, "the parameters get no gradient. Look for detach() or no_grad() behind it"
    ZERO_GRADIENT = 1, "all gradients are 0. Have the units behind it died, or is their output multiplied by 0?"
    NOT_MOVED = (
        5,
        "the steps of the optimizer do not change the parameters despite their gradients. Look for updates too small for their dtype, or for code that masks them",
    )
    SET_BACK = (
        5,
        "the optimizer changes the parameters, and after the step they are as before. Look for code that copies old values into them, as load_state_dict() or copy_() do",
    )

    def __init__(self, weight: int, text: str) -> None:
        self.weight, self.text = weight, text


@dataclass
class Row:
    """One parameter at one step.

    Attributes:
        is_whole: the slice covers all elements.
        has_rate: the learning rate moves it.
        is_stepped: an optimizer steps it in this step.
        version: torch's count of its changes in place.
        has_changed: it differs from the sample before; steps in between may train what this step does not.
        was_written: it is equal to the sample before, and was written in between.
        moved, before: norms of the slice: its change, and before the step.
        noise, energy: as in `Noise.split`.
    """

    module: str
    name: str
    elements: int
    is_whole: bool
    has_rate: bool
    is_stepped: bool = True
    version: int = 0
    has_changed: bool = False
    was_written: bool = False
    grad: Summary | None = None
    weight: Summary | None = None
    moved: float = 0.0
    before: float = 0.0
    noise: float = 0.0
    energy: float = 0.0

    def move(self, moved: float, before: float) -> None:
        """Set the norm of its change, and its norm before the step."""
        self.moved, self.before = moved, before

    def vary(self, noise: float, energy: float) -> None:
        """Set the noise and the energy of its gradient."""
        self.noise, self.energy = noise, energy

    @property
    def update_ratio(self) -> float:
        """Norm of its change relative to its norm before; 0 if that was 0."""
        return self.moved / self.before if self.before else 0.0

    @property
    def standstill(self) -> Standstill | None:
        """Why it is as it was at the sample before; None if it is not, or may change in a step that was not sampled."""
        if self.has_changed:
            return None
        if self.grad is None:
            return Standstill.NO_GRADIENT
        if self.grad.norm == 0 and self.grad.is_finite:
            return Standstill.ZERO_GRADIENT
        if self.moved > 0:  # by less than that, the summaries may be equal after all
            return Standstill.SET_BACK if self.was_written and self.moved > SURE * self.before else None
        has_stayed = self.moved == 0 and self.is_whole and self.has_rate  # a NaN has not
        return Standstill.NOT_MOVED if has_stayed else None


class Noise:
    """Splits the energy of a parameter's gradients into signal (their mean) and noise.

    With g = G + e, e independent from step to step, E|g|^2 = |G|^2 + tr(Cov e), and the square of the weighted mean is
    |G|^2 + c tr(Cov e), where c is the sum of the squared weights. The two equations give both terms. Source:
    McCandlish, Kaplan, Amodei, An Empirical Model of Large-Batch Training, 2018, appendix A.
    """

    def __init__(self) -> None:
        self._mean: Tensor | None = None
        self._energy = 0.0
        self._steps = 0

    def sums(self, grad: Tensor) -> list[Tensor]:
        """Take a gradient; return [] its squared norm and [] that of the mean, on its device."""
        now = grad.reshape(-1)[:NOISE_SLICE].float()
        if self._mean is None or self._mean.shape != now.shape or self._mean.device != now.device:
            self._mean, self._energy, self._steps = torch.zeros_like(now), 0.0, 0
        self._mean.lerp_(now, 1 - DECAY)
        return [torch.dot(now, now), torch.dot(self._mean, self._mean)]

    def split(self, grad: float, mean: float) -> tuple[float, float]:
        """Return tr(Cov e) and E|g|^2, both 0 before the second step.

        Call it once for each call of `sums`, in the same order.
        """
        if not (math.isfinite(grad) and math.isfinite(mean)):
            self._mean = None  # the mean would never be finite again
            return 0.0, 0.0
        self._steps += 1
        self._energy += (1 - DECAY) * (grad - self._energy)
        total = 1 - DECAY**self._steps
        weights = (1 - DECAY) ** 2 * (1 - DECAY ** (2 * self._steps)) / (1 - DECAY**2) / total**2
        if self._steps < 2:
            return 0.0, 0.0
        energy = self._energy / total
        return min(max((energy - mean / total**2) / (1 - weights), 0.0), energy), energy


@dataclass
class Round:
    """The parameters of one optimizer, from before its step to after it.

    Attributes:
        is_whole: all of its parameters that have a gradient are among them.
    """

    rows: dict[Key, Row] = field(default_factory=dict)
    slices: list[tuple[Row, Tensor, Tensor]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    is_whole: bool = True


class Parameters:
    """Samples the parameters of the selected modules before and after an optimizer step."""

    def __init__(
        self,
        context: Context,
        selected: Mapping[str, Module],
        done: Callable[[frozenset[int], list[Row], float | None], None],
    ) -> None:
        self._context = context
        self._selected = selected
        self._done = done
        self._noise: dict[Key, Noise] = {}
        self._rounds: dict[int, Round] = {}  # by the optimizer's id: rounds of this step, and of a step that raised
        self._ended: dict[int, Round] = {}  # the rounds of this step that are over
        self._met: set[Key] = set()  # parameters sampled in this step
        self._seen: dict[Key, tuple[int, Summary]] = {}  # version and summary of each parameter, at its last sample

    def clear(self) -> None:
        """Forget all samples, and release the tensors."""
        self._noise.clear()
        self._rounds.clear()
        self._ended.clear()
        self._met.clear()
        self._seen.clear()

    def before(self, optimizer: Optimizer, is_due: Callable[[Module], bool]) -> None:
        """Summarize gradients and weights, and copy the slices that `after` compares.

        A module's numbers cover all of its parameters: those that this optimizer does not step are sampled too, unless
        that has already happened in this step.
        """
        samples = self._rounds[id(optimizer)] = Round()
        groups = [(self._moves(group.get("lr", 1.0)), group["params"]) for group in groups_of(optimizer)]
        rates = {id(p): moves for moves, parameters in groups for p in parameters}
        for name, parameter in self._context.ordered_parameters(optimizer):
            owner, own_name = owner_of(name)
            module = self._selected.get(owner)
            if (
                module is not None
                and is_due(module)
                and _requires_grad(parameter)
                and not name.startswith("parameter ")
            ):
                self._sample(samples, (owner, own_name), parameter, has_rate=rates[id(parameter)])
            elif _grad(parameter) is not None:
                samples.is_whole = False
        self._sample_others(samples)

    def _sample_others(self, samples: Round) -> None:
        for module in {module: None for module, _ in samples.rows}:
            owner = self._selected[module].torch()
            for name, parameter in parameters_of(owner).items() if owner is not None else ():
                key = module, name
                if key not in self._met:
                    self._sample(samples, key, parameter, has_rate=False, is_other=True)

    def _moves(self, rate: Any) -> bool:
        """Whether a learning rate moves anything; one whose value is on a device is assumed to."""
        if issubclass(type(rate), Tensor):
            return not (self._context.is_readable(rate) and rate.is_cpu and not rate.count_nonzero())
        kind = next((base for base in (float, int) if issubclass(type(rate), base)), None)
        return kind is None or kind.__bool__(rate)

    def _sample(self, samples: Round, key: Key, parameter: Tensor, *, has_rate: bool, is_other: bool = False) -> None:
        elements = Tensor.numel(parameter)
        self._met.add(key)
        row = samples.rows[key] = Row(*key, elements, elements <= SLICE, has_rate, is_stepped=not is_other)
        row.version = of_tensor(parameter, "_version")
        self._context.summary(parameter, lambda summary: setattr(row, "weight", summary))
        grad = _grad(parameter) if _requires_grad(parameter) else None
        if grad is not None:
            self._context.summary(grad, lambda summary: setattr(row, "grad", summary))
        weights = self._strided(parameter)
        if weights is not None:
            samples.slices.append((row, weights, weights.reshape(-1)[:SLICE].clone()))
        grads = None if grad is None or is_other else self._strided(grad)
        if grads is not None:
            noise = self._noise.setdefault(key, Noise())
            samples.requests.append((noise.sums(grads), lambda grad, mean: row.vary(*noise.split(grad, mean)), row))

    def _strided(self, tensor: Tensor) -> Tensor | None:
        """Return the dense tensor whose first elements are compared, this rank's part if it is distributed."""
        is_distributed = type(tensor).__module__.startswith("torch.") and hasattr(type(tensor), "to_local")
        local = tensor.to_local() if is_distributed else tensor  # type: ignore[attr-defined]
        if not (self._context.is_readable(local) and local.is_contiguous()):
            return None
        if local.is_complex():
            return torch.view_as_real(local.detach())
        return local.detach() if local.is_floating_point() else None

    def after(self, optimizer: Optimizer) -> None:
        """Measure how far the slices have moved; `end` reports it."""
        samples = self._rounds.pop(id(optimizer), None)
        if samples is None or not samples.rows:
            return
        for row, weights, before in samples.slices:
            if not self._context.is_readable(weights):  # the step has moved it out of memory
                continue
            now, was = weights.reshape(-1)[:SLICE].float(), before.float()
            samples.requests.append(([torch.dist(now, was), torch.linalg.vector_norm(was)], row.move, row))
        samples.slices.clear()
        self._ended[id(optimizer)] = samples

    def end(self) -> None:
        """End a step: pass all of its rows to `done`; on a device, after the next step."""
        ended, self._ended = self._ended, {}
        self._rounds.clear()  # of a step that raised
        self._met.clear()
        if not ended:
            return
        rows: dict[Key, Row] = {}
        by_device: dict[torch.device, list[Request]] = {}
        for samples in ended.values():
            rows.update(samples.rows)  # the row of the optimizer that steps a parameter replaces those of others
            for request in samples.requests:
                by_device.setdefault(request[0][0].device, []).append(request)
        waiting = set(by_device)

        def arrived(device: torch.device, numbers: list[float]) -> None:
            for at, (_, take, _) in enumerate(by_device[device]):
                take(*numbers[2 * at : 2 * at + 2])
            answered(device)

        def lost(device: torch.device) -> None:
            for _, take, row in by_device[device]:
                take(math.nan, math.nan)
                row.weight = None  # so that the module is not reported
            answered(device)

        def answered(device: torch.device) -> None:
            waiting.discard(device)
            if not waiting:
                self._report(ended, rows)

        for device, requests in by_device.items():
            tensors = [number for pair, _, _ in requests for number in pair]
            if device.type == "cpu":
                arrived(device, [float(number) for number in tensors])
            else:
                self._context.later(tensors, partial(arrived, device), partial(lost, device))
        if not by_device:
            self._report(ended, rows)

    def _report(self, ended: Mapping[int, Round], rows: dict[Key, Row]) -> None:
        reported = []
        unknown = {key[0] for key, row in rows.items() if row.elements and row.weight is None}
        # In the order of the models, even if each parameter has its own optimizer, and the last parameter steps first.
        for key, row in sorted(rows.items(), key=lambda item: self._selected[item[0][0]].id):
            # A module is only reported with the numbers of all of its parameters.
            if row.weight is not None and key[0] not in unknown:
                version, weight = self._seen.get(key, (row.version, row.weight))
                row.has_changed = weight != row.weight
                row.was_written = not row.has_changed and row.version > version  # the same number: that of a new model
                self._seen[key] = row.version, row.weight
                reported.append(row)
        if reported:
            is_whole = all(samples.is_whole for samples in ended.values()) and not unknown
            grads = [row.grad.norm for row in reported if row.is_stepped and row.grad is not None]
            self._done(frozenset(ended), reported, math.hypot(*grads) if is_whole and grads else None)


def by_module(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group rows by their module, in order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.module, []).append(row)
    return groups
