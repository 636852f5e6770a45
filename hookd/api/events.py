"""Records about modules and their calls that hooks receive; none of them keeps a model alive."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from hookd.api.passive import of_tensor

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from torch import Tensor, nn


class Module:
    """Describes a module of an observed model to hooks: its name and its place in the tree.

    Attributes:
        name: as in `named_modules()`, without wrapper prefixes; the main root is `(root)`, and names in another
            root begin with its class, as in `#Critic.`. This is the value of the label `module`.
        type: the name of its class.
        id: a number that is never reused in this process; a good key for a plugin's own dict.
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
        self._waits = 0  # see hookd.target.events.batching; stored here because plans have the module at hand

    def torch(self) -> nn.Module | None:
        """Return the module itself, or None when it is gone. Never keep it."""
        return None if self._ref is None else self._ref()

    def __repr__(self) -> str:
        return f"<Module {self.name} ({self.type})>"


class Call(NamedTuple):
    """A module call that has returned, with the training's own objects: keep none of them.

    Attributes:
        module: the one that was called.
        inputs: positional inputs, as they are now.
        kwargs: keyword inputs, as they are now.
        output: as it is now.
        version: the output's version counter at return; -1 if the output is not a plain tensor with such a counter.
        before: `hookd.versions` of the inputs at entry; empty if they could not be read, or if a plugin may have replaced
            the output.
        inside: the module, the module that called it, and so on outwards: see `stack`.
        was_finite: whether hookd checked the output at return and found all numbers finite. Only outputs of modules whose
            outputs are changed in place are checked, since a hook that is called later can no longer check them; False for
            all others.
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
        """Return the modules that were being called, the outermost first and this one last."""
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
        module: the one that was called.
        ref: returns the tensor, or None when it is gone.
        version: the tensor's version counter at return; an in-place operation raises it.
        inputs: at most 8 functions, one for each tensor among the positional inputs; each returns the tensor, or None when
            it is gone. Empty for an output on a device.
        was_finite: whether hookd checked the output at return and found all numbers finite, or `-inf`. Such an output is not
            remembered, and `ref` returns None.
    """

    module: Module
    ref: Callable[[], Tensor | None]
    version: int
    inputs: tuple[Callable[[], Tensor | None], ...]
    was_finite: bool = False

    def tensor(self) -> Tensor | None:
        """Return the tensor if it is unchanged; None when it is gone, was changed in place, or its memory was freed."""
        tensor = self.ref()
        is_unchanged = tensor is not None and self.version == of_tensor(tensor, "_version") and not is_freed(tensor)
        return tensor if is_unchanged else None


def is_freed(tensor: Tensor) -> bool:
    """Whether the storage of a tensor has been emptied (`resize_(0)`) while the tensor still has elements."""
    try:
        kind = sys.modules["torch"].Tensor  # bypasses overrides of a tensor subclass
        return not kind.untyped_storage(tensor).nbytes() and kind.numel(tensor) > 0
    except (RuntimeError, AttributeError):  # without a storage: sparse; torch before 2.0
        return False
