"""What a hook is told about a module. Runs in the target, and never keeps a model alive."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from hookd.api.passive import of_tensor

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from torch import Tensor, nn


class Module:
    """A module of an observed model, as hooks see it: a name and a place in the tree, not the module itself.

    Attributes:
        name: as in `named_modules()`, without wrapper prefixes; the root is `(root)`, the names of a second root
            begin with `#2.`. This is the value of the label `module`.
        type: the name of its class.
        id: a number that no other module of this process has had; a good key for a plugin's own dict.
        depth: 0 for a root.
        root: the ordinal of its root, from 1.
        parent: the module that contains it, None for a root.
        leaf: whether it contains no modules.
    """

    __slots__ = ("_ref", "_waits", "depth", "id", "leaf", "name", "parent", "root", "type")

    def __init__(  # noqa: PLR0913 - a record
        self, name: str, kind: str, number: int, root: int, parent: Module | None, *, leaf: bool
    ) -> None:
        self.name = name
        self.type = kind
        self.id = number
        self.root = root
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.leaf = leaf
        self._ref: weakref.ref[nn.Module] | None = None
        self._waits = 0  # see hookd.target.events.batching; here, where plans have it at hand

    def torch(self) -> nn.Module | None:
        """Give the module itself, or None when it is gone. Never keep it."""
        return None if self._ref is None else self._ref()

    def __repr__(self) -> str:
        return f"<Module {self.name} ({self.type})>"


class Call(NamedTuple):
    """A module call that has returned, with the training's own objects: keep none of them.

    Attributes:
        module: that was called.
        inputs: by position, as they are now.
        kwargs: by name.
        output: as it is now.
        version: which version of the output was returned, where it is a plain tensor that counts them; else -1.
        before: `hookd.versions` of the inputs at entry; empty where that could not be asked, or where a plugin may have
            replaced the output.
        inside: the module, what it was called inside of, and so on: see `stack`.
        was_finite: hookd has looked when it returned, and all numbers of the output were finite. Of outputs that are changed
            in place, for whoever is told later could not find that out; of all others it is not known.
    """

    module: Module
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    version: int
    before: tuple[int, ...]
    inside: tuple[Any, ...] | None
    was_finite: bool = False

    def stack(self) -> tuple[Module, ...]:
        """Give the modules that were being called, the outermost first and this one last."""
        modules, inside = [], self.inside
        while inside is not None:
            modules.append(inside[0])
            inside = inside[1]
        return tuple(reversed(modules))

    def is_changed(self) -> bool:
        """Whether the output has been changed in place, or its memory freed, since it was returned."""
        return self.version >= 0 and (self.version != self.output._version or is_freed(self.output))  # noqa: SLF001


class Returned(NamedTuple):
    """A tensor that a module call has returned; it is not kept alive.

    Attributes:
        module: that was called.
        ref: gives the tensor, or None when it is gone.
        version: which version of the tensor was returned: an operation in place makes another.
        inputs: give the tensors that it was called with by position, at most 8, or None where one is gone; none are noted
            for an output on a device.
        was_finite: hookd has looked at it as it was returned, and it was, or had -inf alone; it is gone for that.
    """

    module: Module
    ref: Callable[[], Tensor | None]
    version: int
    inputs: tuple[Callable[[], Tensor | None], ...]
    was_finite: bool = False

    def tensor(self) -> Tensor | None:
        """Return the tensor as it was returned; None when it is gone, was changed in place, or its memory was freed."""
        tensor = self.ref()
        is_as_it_was = tensor is not None and self.version == of_tensor(tensor, "_version") and not is_freed(tensor)
        return tensor if is_as_it_was else None


def is_freed(tensor: Tensor) -> bool:
    """Whether the storage of a tensor has been emptied (`resize_(0)`) while the tensor still has elements."""
    try:
        kind = sys.modules["torch"].Tensor  # past what a class of tensors has in its place
        return not kind.untyped_storage(tensor).nbytes() and kind.numel(tensor) > 0
    except (RuntimeError, AttributeError):  # without a storage: sparse; torch before 2.0
        return False
