"""Find models that are trained in evaluation mode, as a whole or in their Dropout or BatchNorm modules."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from hookd import Context, groups_of, modules_in, of_tensor, parameters_of, peek

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim import Optimizer

    from hookd import Module

    _Place = tuple[str, "weakref.ref[nn.Module]", "weakref.ref[nn.Module]"]

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
WITH_DROPOUT = (nn.MultiheadAttention, nn.RNN, nn.LSTM, nn.GRU)
RELIST = 16
"""The modules of a model are listed again after so many sampled backwards."""
SHOWN = 4


class Listed:
    """The modules of a model whose behaviour depends on its mode: Dropout that drops anything, and BatchNorm with statistics.

    Attributes:
        dropouts: path, weak reference, and weak reference to the module that contains it.
        norms: likewise.
    """

    def __init__(self, root: nn.Module) -> None:
        self.ref = weakref.ref(root)
        self.age = 0
        self.dropouts: list[_Place] = []
        self.norms: list[_Place] = []
        above = {"": root}
        for path, module in modules_in(root):
            above[path] = module
            container = above.get(path.rpartition(".")[0])
            place = path, weakref.ref(module), weakref.ref(root if container is None else container)
            kind = type(module)
            if (issubclass(kind, DROPOUTS) and peek(module, "p")) or (
                issubclass(kind, WITH_DROPOUT) and peek(module, "dropout")
            ):
                self.dropouts.append(place)
            elif issubclass(kind, NORMS) and peek(module, "track_running_stats"):
                self.norms.append(place)

    def in_eval(self) -> tuple[list[str], bool]:
        """Return the paths of modules that are in `eval()` by mistake, and whether the model is as a whole.

        A block that is frozen may well be in `eval()`, and so may BatchNorm modules, to keep their statistics.
        """
        root = self.ref()
        if root is not None and peek(root, "training") is False:
            found, count = _in_eval((*self.dropouts, *self.norms))
            return found, len(found) == count
        return _in_eval(self.dropouts)[0], False


def _in_eval(places: Sequence[_Place]) -> tuple[list[str], int]:
    """Return the paths of the trained modules in `eval()`, and the number of trained modules."""
    found, count = [], 0
    for path, ref, above in places:
        module, container = ref(), above()
        if module is not None and container is not None and _is_trained(container):
            count += 1
            if peek(module, "training") is False:
                found.append(path)
    return found, count


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
            paths, is_whole = listed.in_eval()
            self._found.append((root, listed.ref, paths, is_whole))

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
