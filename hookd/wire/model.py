"""The models of a target, as `hookd snapshot PID --json` prints them."""

from __future__ import annotations

from typing import TypedDict

# `class` is a keyword in Python: the functional syntax takes it.
_ClassOf = TypedDict("_ClassOf", {"class": str}, total=False)


class TensorRow(_ClassOf, total=False):
    """A parameter or a buffer, with its `class` unless that is Tensor or Parameter. What cannot be read is left out."""

    name: str
    """In its module."""
    same_as: str
    """The name of the same tensor in a module before this one; nothing else is known of it then."""
    dtype: str
    device: str
    requires_grad: bool
    shape: list[int]
    """Of this rank's part for a DTensor."""
    global_shape: list[int]
    """The shape of a whole DTensor."""
    elements: int
    bytes: int
    layout: str
    """If it is not strided."""
    uninitialized: bool
    """Whether a lazy module has not made it yet."""
    unknown: str
    """Why it cannot be read."""
    persistent: bool
    """Whether a buffer is in the state_dict."""


class HookRow(TypedDict, total=False):
    """A hook that somebody else has registered."""

    kind: str
    function: str
    """Where it is defined."""
    count: int
    """How many equal ones there are on the module."""
    on: str
    """The parameter on which it is; absent for a hook on the module."""


_Class = TypedDict("_Class", {"class": str})


class ModuleDescription(_Class):
    """A module, with the name of its `class`."""

    name: str
    """As in the page."""
    root: int
    """The number of its model."""
    home: str
    """The Python module of its class."""
    training: bool | None
    """None: it has no such flag."""
    wrapped: bool
    """Whether it is inside the wrapper of the same name before it."""
    seen: str
    """Whether it is observed, else why not: `observed`, `unheard`, `container`, `compiled`, `scripted`, `never_called` or `left_out`."""
    plugins: list[str]
    """The plugins that listen there."""
    parameters: list[TensorRow]
    buffers: list[TensorRow]
    hooks: list[HookRow]
    left_out: int
    """Number of further tensors and hooks."""


class SnapshotPart(TypedDict):
    """Some modules of a snapshot."""

    modules: list[ModuleDescription]
    """Parents first."""
    is_over: bool
    """Whether these are the last."""


class Share(TypedDict):
    """The tensors of one dtype on one device."""

    dtype: str
    device: str
    kind: str
    """`parameters` or `buffers`."""
    elements: int
    bytes: int


class Totals(TypedDict):
    """The sizes of all modules. A tensor that several modules share counts once."""

    modules: int
    """Their number."""
    parameters: int
    """Elements."""
    trainable: int
    """Elements of parameters that require gradients."""
    buffers: int
    """Elements."""
    bytes: int
    """Of parameters and buffers."""
    unknown: int
    """Number of tensors of unknown size."""
    by: list[Share]


class Models(TypedDict):
    """The models of a target."""

    pid: int
    modules: list[ModuleDescription]
    totals: Totals
    is_cut: bool
    """Whether the target has more modules."""
