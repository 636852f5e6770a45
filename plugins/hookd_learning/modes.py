"""Find models that are trained in evaluation mode, as a whole or in their Dropout or BatchNorm modules."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from hookd import Context, groups_of, modules_in, of_tensor, parameters_of, peek

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

    from hookd import Module

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
WITH_DROPOUT = (nn.MultiheadAttention, nn.RNN, nn.LSTM, nn.GRU)
RELIST = 16
"""The modules of a model are listed again after so many sampled backwards."""
SHOWN = 4


class Listed:
    """The modules of a model whose behaviour depends on its mode: Dropout that drops anything, and trained BatchNorm.

    Attributes:
        dropouts, norms: path, weak reference, and weak reference to the module that contains it.
    """

    def __init__(self, root: nn.Module) -> None:
        self.ref = weakref.ref(root)
        self.age = 0
        self.dropouts: list[tuple[str, weakref.ref[nn.Module], weakref.ref[nn.Module]]] = []
        self.norms: list[tuple[str, weakref.ref[nn.Module], weakref.ref[nn.Module]]] = []
        parents = {"": root}
        for path, module in modules_in(root):
            parents[path] = module
            parent = weakref.ref(parents.get(path.rpartition(".")[0], root))
            if issubclass(type(module), DROPOUTS):
                if peek(module, "p"):
                    self.dropouts.append((path, weakref.ref(module), parent))
            elif issubclass(type(module), NORMS):
                if peek(module, "track_running_stats"):
                    self.norms.append((path, weakref.ref(module), parent))
            elif issubclass(type(module), WITH_DROPOUT) and peek(module, "dropout"):
                self.dropouts.append((path, weakref.ref(module), parent))

    def in_eval(self) -> tuple[list[str], bool]:
        """Return the paths of Dropout and trained BatchNorm modules in `eval()`, and whether those are all there are."""
        found, count = [], 0
        for path, ref, parent in (*self.dropouts, *self.norms):
            module, above = ref(), parent()
            if module is None or above is None:
                continue
            count += 1
            # A block that is frozen as a whole may well be in eval().
            if peek(module, "training") is False and (_is_trained(module) or _is_trained(above)):
                found.append(path)
        return found, len(found) == count


class Modes:
    """Looks at the modes of models when a backward begins, and judges them when an optimizer has changed the model.

    Args:
        see: takes a sample of a finding: kind, what it is about, message, fields.
    """

    def __init__(self, context: Context, see: Callable[..., None]) -> None:
        self._context, self._see = context, see
        self._listed: dict[int, Listed] = {}
        self._found: list[tuple[Module, weakref.ref[nn.Module], list[str], bool]] = []

    def backward_begins(self) -> None:
        """Note which modules are in `eval()`."""
        self._found = []
        for root, module in self._context.models():
            listed = self._list(module)
            paths, are_all = listed.in_eval()
            self._found.append((root, listed.ref, paths, are_all and peek(module, "training") is False))

    def _list(self, module: nn.Module) -> Listed:
        listed = self._listed.get(id(module))
        if listed is None or listed.ref() is not module or listed.age >= RELIST:
            listed = self._listed[id(module)] = Listed(module)
        listed.age += 1
        return listed

    def step_over(self, optimizer: Optimizer) -> None:
        """Judge the models of which an optimizer has parameters with gradients."""
        stepped = {id(p) for group in groups_of(optimizer) for p in group["params"] if of_tensor(p, "grad") is not None}
        for root, ref, paths, is_whole in self._found:
            module = ref()
            if module is not None and any(id(p) in stepped for p in _parameters(module)):
                self._see("eval_mode", root.name, self._message(root, paths, is_whole=is_whole), module=root.name)
        self._found = []

    def _message(self, root: Module, paths: list[str], *, is_whole: bool) -> str:
        if not paths:
            return ""
        listed = ", ".join(paths[:SHOWN]) + (f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else "")
        name = self._context.described(root.name)
        if is_whole:
            return f"{name} is trained in eval(), so its Dropout and BatchNorm do not act as in training ({listed}): call train() on it"
        return f"{listed} of {name} {'are' if len(paths) > 1 else 'is'} in eval() while the rest is trained in train(): call train() on the model"

    def clear(self) -> None:
        """Forget the modules."""
        self._listed.clear()
        self._found.clear()


def _is_trained(module: nn.Module) -> bool:
    """Whether any parameter in a module needs a gradient."""
    return any(of_tensor(p, "requires_grad") for p in _parameters(module))


def _parameters(module: nn.Module) -> Iterator[Any]:
    for _, inner in modules_in(module):
        yield from parameters_of(inner).values()
