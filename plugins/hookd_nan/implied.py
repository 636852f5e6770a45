"""Outputs that need not be read, because what is read says of them that they are finite. Runs in the target.

Reading is most of what a look at a large tensor costs. Two kinds of modules of torch save it. One that *tells* of its
input: a NaN or an infinity in it makes its output bad as well (each output element of a Linear has every element of a row
in it; inf * 0 is NaN). One that *keeps* what it is given: of finite numbers it makes finite ones. So in
Conv2d, BatchNorm2d, ReLU only the second output is read, and in LayerNorm, Linear, GELU only the last. If anything that is
read is bad, all outputs are read, one by one and in order: no origin is inferred.

Which outputs of a portion these are is found out once for each sequence of modules; every time it is seen that the
tensors were handed on as they were then, unchanged. If they were not, all are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn
from torch.nn.modules import module as torch_module

from hookd import attributes_of, peek

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hookd import Call, Module


def _classes(names: str) -> frozenset[type]:
    return frozenset(getattr(nn, name) for name in names.split() if hasattr(nn, name))


TELLS = _classes("Linear LayerNorm RMSNorm GroupNorm BatchNorm1d BatchNorm2d BatchNorm3d GELU SiLU Dropout")
"""Not ReLU, which makes 0 of -inf, nor convolutions: a stride may leave elements out."""
KEEPS = _classes("ReLU ReLU6 Tanh Sigmoid SiLU Softmax Identity Flatten")
"""Not Dropout, whose scaling can overflow, nor GELU, which makes an infinity of the largest numbers; nor what has numbers of
the user's in it (ELU, Hardtanh), nor a pooling: where it is dilated, a window of padding alone gives -inf."""
_TELLS, _KEEPS = frozenset(map(id, TELLS)), frozenset(map(id, KEEPS))  # to hash a class is its metaclass's affair
FEW = 64
"""In a portion of more calls the outputs are small: asking costs more than reading."""
MOST = 1024
"""So many sequences of modules are known at a time."""
_NEITHER = (False, False)


class Portion(NamedTuple):
    """What is known of a sequence of module calls; all numbers are places in it.

    Attributes:
        read: whose outputs are to be read.
        known: whose outputs hookd has read as they returned.
        same: whose output is that of the call before.
        kept: who kept what the call before had made.
        told: of whose output the call after tells.
    """

    read: list[int]
    known: list[int]
    same: list[int]
    kept: list[int]
    told: list[int]


class Implied:
    """Finds out which outputs of a portion are to be read.

    Args:
        kinds: a table by `Module.id` (`Context.per_module`): whether a module tells of its input, and keeps what it is given.
    """

    def __init__(self, kinds: dict[int, tuple[bool, bool]]) -> None:
        self._kinds = kinds
        self._portions: dict[tuple[int, ...], Portion] = {}

    def learn(self, module: Module) -> None:
        """See what a module is, before its first call."""
        kind = id(type(module.torch()))
        if kind in _TELLS or kind in _KEEPS:
            self._kinds[module.id] = kind in _TELLS, kind in _KEEPS

    def to_read(self, calls: Sequence[Call], good: Tensor | None, version: int) -> list[Tensor]:
        """Give the outputs of which the others follow.

        Args:
            calls: in the order of returning; their outputs are single tensors all.
            good: the tensor that was found finite last; None for none.
            version: which one of it that was.
        """
        if len(calls) > FEW:
            read = [call for call in calls if not call.was_finite]
            return [
                call.output
                for call, before in zip(read, [None, *read])
                if not before or call.output is not before.output
            ]
        sequence = tuple([call.module.id for call in calls])
        befores = [(good, version), *[(call.output, call.version) for call in calls]]
        portion = self._portions.get(sequence)
        if portion is None or not self._holds(portion, calls, befores):
            if len(self._portions) >= MOST:
                self._portions.clear()
            portion = self._portions[sequence] = self._found(calls, befores)
        return [calls[at].output for at in portion.read]

    def _holds(self, portion: Portion, calls: Sequence[Call], befores: list[tuple[Tensor | None, int]]) -> bool:
        """Whether all of it is so this time."""
        return (
            not _is_hooked()
            and all(calls[at].was_finite for at in portion.known)
            and all(_is_same(calls[at], befores[at]) for at in portion.same)
            and all(_takes(calls[at], befores[at]) for at in portion.kept)
            and all(_takes(calls[at + 1], befores[at + 1]) for at in portion.told)
        )

    def _found(self, calls: Sequence[Call], befores: list[tuple[Tensor | None, int]]) -> Portion:
        """Find out what follows from what, from the last call to the first."""
        portion = Portion([], [], [], [], [])
        infers = not _is_hooked()
        may_tell = False  # the call after: its output is read or told of, so that it does not rest on this one
        for at in range(len(calls) - 1, -1, -1):
            call = calls[at]
            if call.was_finite:
                portion.known.append(at)
                may_tell = True
            elif _is_same(call, befores[at]):
                portion.same.append(at)
                may_tell = False
            elif infers and self._kinds.get(call.module.id, _NEITHER)[1] and _takes(call, befores[at]):
                portion.kept.append(at)
                may_tell = False
            elif (
                infers
                and may_tell
                and self._kinds.get(calls[at + 1].module.id, _NEITHER)[0]
                and _takes(calls[at + 1], befores[at + 1])
            ):
                portion.told.append(at)
            else:
                portion.read.append(at)
                may_tell = True
        return portion


def _is_hooked() -> bool:
    """Whether hooks for all modules may give another input, or another output."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)  # noqa: SLF001


def _is_same(call: Call, before: tuple[Tensor | None, int]) -> bool:
    return call.output is before[0] and call.version == before[1]


def _takes(call: Call, before: tuple[Tensor | None, int]) -> bool:
    """Whether a call was given what the one before it had made, as it was, and its class's own forward alone ran on it."""
    if not call.inputs or call.inputs[0] is not before[0] or call.before[:1] != before[1:]:
        return False
    held = call.module.torch()
    if held is None:
        return False
    own = attributes_of(held)
    if own.get("_forward_hooks") or own.get("_forward_pre_hooks") or "forward" in own or "weight" in own:
        return False
    weight = peek(held, "weight")  # one that is a tensor of the user's may compute otherwise
    return weight is None or type(weight) is nn.Parameter
