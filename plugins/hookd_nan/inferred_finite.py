"""Infer which outputs are finite from the other outputs, so that they need not be read.

Reading is most of the cost of checking a large tensor. Two kinds of torch modules save it:
- A module that *propagates* bad values: a NaN or an infinity in the input makes the output bad as well. (Each output
  element of a Linear contains every element of a row; inf * 0 is NaN.)
- A module that *preserves* finiteness: its output is finite if its input is.
So of Conv2d, BatchNorm2d, ReLU only the second output is read, and of LayerNorm, Linear, GELU only the last. If an output
that is read is bad, all outputs are read, one by one and in order: an origin is never inferred.

The outputs to read are found once for each sequence of modules. Each later portion must pass its tensors on in the same
way, unchanged; otherwise the outputs to read are found again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn
from torch.nn.modules import module as torch_module

from hookd import attributes_of, peek, tensor_ref

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from hookd import Call, Module


def _classes(names: str) -> frozenset[type]:
    return frozenset(getattr(nn, name) for name in names.split() if hasattr(nn, name))


PROPAGATES = _classes("Linear LayerNorm RMSNorm GroupNorm BatchNorm1d BatchNorm2d BatchNorm3d GELU SiLU Dropout")
"""Modules that propagate bad values. ReLU does not, because it maps -inf to 0; nor do convolutions, because a stride may
skip elements."""
PRESERVES = _classes("ReLU ReLU6 Tanh Sigmoid SiLU Softmax Identity Flatten")
"""Modules that preserve finiteness. Not among them are Dropout, whose scaling can overflow; GELU, which turns the
largest numbers into infinity; modules with numbers of the user's (ELU, Hardtanh); and pooling: if it is dilated, a window
of padding alone gives -inf."""
# By id, because a metaclass may define the hash of a class.
_PROPAGATES, _PRESERVES = frozenset(map(id, PROPAGATES)), frozenset(map(id, PRESERVES))
FEW = 64
"""In a portion with more calls the outputs are small, and inferring costs more than reading."""
MOST = 1024
"""Largest number of sequences of modules that are remembered."""
NEITHER = (False, False)


class ReadPlan(NamedTuple):
    """The outputs to read for a sequence of module calls, and why not the others.

    Attributes:
        read: positions of the calls whose outputs are to be read.
        known: those whose outputs hookd read when they returned.
        same: those whose output is the output of the previous call.
        preserved: those that preserved the finiteness of the output of the previous call.
        propagated: those whose bad values the next call propagates.
    """

    read: list[int]
    known: list[int]
    same: list[int]
    preserved: list[int]
    propagated: list[int]


def _nothing() -> None:
    """Stand in for a reference to an output."""


class InferredFinite:
    """Finds the outputs of a portion that must be read.

    Args:
        kinds: table by `Module.id` (`Context.per_module`): whether a module propagates bad values, and preserves finiteness.

    Attributes:
        good: a weak reference to the output that was last found good, and its version counter then. A container mostly
            returns the same tensor as its last module.
    """

    def __init__(self, kinds: dict[int, tuple[bool, bool]]) -> None:
        self._kinds = kinds
        self._plans: dict[tuple[int, ...], ReadPlan] = {}
        self.good: tuple[Callable[[], Tensor | None], int] = (_nothing, 0)

    def note(self, call: Call) -> None:
        """Remember a good output, if it has a version counter that shows changes."""
        self.good = _nothing if call.version < 0 else tensor_ref(call.output), call.version

    def forget(self) -> None:
        """Forget the good output at the end of the outermost call."""
        self.good = _nothing, 0

    def learn(self, module: Module) -> None:
        """Record the kind of a module before its first call."""
        kind = id(type(module.torch()))
        if kind in _PROPAGATES or kind in _PRESERVES:
            self._kinds[module.id] = kind in _PROPAGATES, kind in _PRESERVES

    def to_read(self, calls: Sequence[Call]) -> list[Tensor]:
        """Return the outputs from which the others can be inferred.

        Args:
            calls: in the order in which they returned; each output is a single tensor.
        """
        if len(calls) > FEW:
            read = [call for call in calls if not call.was_finite]
            return [
                call.output
                for call, before in zip(read, [None, *read])
                if not before or call.output is not before.output
            ]
        sequence = tuple([call.module.id for call in calls])
        befores = [(self.good[0](), self.good[1]), *[(call.output, call.version) for call in calls]]
        plan = self._plans.get(sequence)
        if plan is None or not self._holds(plan, calls, befores):
            if len(self._plans) >= MOST:
                self._plans.clear()
            plan = self._plans[sequence] = self._inferred(calls, befores)
        return [calls[at].output for at in plan.read]

    def _holds(self, plan: ReadPlan, calls: Sequence[Call], befores: list[tuple[Tensor | None, int]]) -> bool:
        """Whether everything that the portion relies on is true for these calls."""
        return (
            not _is_hooked()
            and all(calls[at].was_finite for at in plan.known)
            and all(_is_same(calls[at], befores[at]) for at in plan.same)
            and all(_takes(calls[at], befores[at]) for at in plan.preserved)
            and all(_takes(calls[at + 1], befores[at + 1]) for at in plan.propagated)
        )

    def _inferred(self, calls: Sequence[Call], befores: list[tuple[Tensor | None, int]]) -> ReadPlan:
        """Return the outputs to read, decided from the last call to the first."""
        plan = ReadPlan([], [], [], [], [])
        infers = not _is_hooked()
        is_next_known = False  # the next call's output is known without this one's, so it may show a bad value of it
        for at in range(len(calls) - 1, -1, -1):
            call = calls[at]
            if call.was_finite:
                plan.known.append(at)
                is_next_known = True
            elif _is_same(call, befores[at]):
                plan.same.append(at)
                is_next_known = False
            elif infers and self._kinds.get(call.module.id, NEITHER)[1] and _takes(call, befores[at]):
                plan.preserved.append(at)
                is_next_known = False
            elif (
                infers
                and is_next_known
                and self._kinds.get(calls[at + 1].module.id, NEITHER)[0]
                and _takes(calls[at + 1], befores[at + 1])
            ):
                plan.propagated.append(at)
            else:
                plan.read.append(at)
                is_next_known = True
        return plan


def _is_hooked() -> bool:
    """Whether there are global module hooks, which may replace inputs or outputs."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)  # noqa: SLF001


def _is_same(call: Call, before: tuple[Tensor | None, int]) -> bool:
    return call.output is before[0] and call.version == before[1]


def _takes(call: Call, before: tuple[Tensor | None, int]) -> bool:
    """Whether a call took the unchanged output of the previous one, and ran only the forward of its class on it."""
    if not call.inputs or call.inputs[0] is not before[0] or call.before[:1] != before[1:]:
        return False
    module = call.module.torch()
    if module is None:
        return False
    own = attributes_of(module)
    if own.get("_forward_hooks") or own.get("_forward_pre_hooks") or "forward" in own or "weight" in own:
        return False
    weight = peek(module, "weight")  # a tensor of the user's own class may compute something else
    return weight is None or type(weight) is nn.Parameter
