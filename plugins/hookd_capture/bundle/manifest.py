"""The contents of `bundle.json`, which `hookd_capture.bundle` explains.

A bundle may come from anybody. One that was read may differ from these types: values are checked where they are used.
"""

from __future__ import annotations

from typing import Any, TypedDict

TensorKey = TypedDict("TensorKey", {"$tensor": str})
Shared = TypedDict("Shared", {"$same": str}, total=False)


class MadeBy(TypedDict):
    """The process that wrote the bundle."""

    hookd: str
    torch: str
    python: str
    run: str
    rank: int
    pid: int
    time: float
    """Unix seconds."""


class Autocast(TypedDict):
    """Autocast on a device."""

    dtype: str
    cache: bool


class TorchState(TypedDict):
    """The state of torch when the module was entered."""

    random: dict[str, TensorKey]
    """By device, the state of its generator."""
    grad: bool
    inference: bool
    autocast: dict[str, Autocast]
    """By device."""


class CallRecord(TypedDict):
    """The call."""

    module: str
    where: str
    kind: str
    masks: bool
    inputs: Any
    kwargs: Any
    output: Any
    gradient: Any
    inputs_changed: bool | None
    state: TorchState | None


class ModuleRecord(Shared, total=False):
    """A module; the second place of a shared one has only `$same`."""

    module: str
    qualname: str
    file: str | None
    hooks: list[str]
    extra_repr: str
    training: bool
    parameters: dict[str, dict[str, str] | None]
    buffers: dict[str, dict[str, str] | None]
    attributes: dict[str, object]
    children: dict[str, ModuleRecord]
    empty: list[str]


class TensorRecord(TypedDict):
    """The properties of a tensor that the file of tensors does not have."""

    dtype: str
    shape: list[int]
    stride: list[int]
    device: str
    requires_grad: bool
    is_leaf: bool
    is_parameter: bool


class Settings(TypedDict):
    """The process-wide settings that decide the bits of a result."""

    threads: int
    dtype: str
    float32_matmul_precision: str
    deterministic: bool


class Manifest(TypedDict):
    """A bundle without its tensors."""

    format: str
    version: int
    made_by: MadeBy
    call: CallRecord
    module: ModuleRecord
    tensors: dict[str, TensorRecord]
    settings: Settings
    notes: list[str]
    incident: dict[str, object]
    """Its message and its fields."""
