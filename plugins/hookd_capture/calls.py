"""Keep what is needed to make a call again: torch's state at its entry, and the gradients that reach its output."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from hookd import Module
    from hookd_capture.bundle.manifest import Autocast

CALM = frozenset(
    getattr(torch.nn, name)
    for name in (
        "Linear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Embedding LayerNorm GroupNorm RMSNorm"
        " BatchNorm1d BatchNorm2d BatchNorm3d SyncBatchNorm InstanceNorm1d InstanceNorm2d InstanceNorm3d Identity Flatten"
        " ReLU ReLU6 LeakyReLU PReLU ELU SELU CELU GELU SiLU Mish Sigmoid Tanh Softplus Softmax LogSoftmax Hardtanh"
        " Hardswish Hardsigmoid MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d AdaptiveAvgPool1d"
        " AdaptiveAvgPool2d AdaptiveAvgPool3d"
    ).split()
    if hasattr(torch.nn, name)
)
"""Classes whose forward draws no random numbers: reading the generators' state is most of the cost of `States.enter`."""
_CALM = frozenset(map(id, CALM))  # ids: a metaclass may define the hash of a class
_cuda_is_initialized: Any = torch.cuda.is_initialized
_is_grad_enabled, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", bool)  # noqa: SLF001 - torch 1.13+; there is no other


class State(NamedTuple):
    """The modes of torch when a module was entered, and the generators' states by device (`torch.get_rng_state`)."""

    random: dict[str, Tensor]
    grad: bool
    inference: bool
    autocast: dict[str, Autocast]


class Call(NamedTuple):
    """A call that has returned, with the training's own objects; it is kept to the end of the step at most.

    Attributes:
        output: None in a call that is kept for its backward, because the output would keep the graph.
        before: `hookd.versions` of the inputs at entry; empty if they could not be read.
        state: torch's state at entry, None if unknown.
        gradient: of the outputs, in their order; None for an output without one.
        number: how many calls the model has made in this step, up to this one.
    """

    module: Module
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    before: tuple[int, ...]
    state: State | None
    gradient: tuple[Any, ...] = ()
    number: int = 1


class States:
    """The states of torch at the entry of the calls that have not returned."""

    def __init__(self) -> None:
        self._entered: dict[tuple[int, int], State] = {}
        self._calm: set[int] = set()  # by module.id

    def learn(self, module: Module) -> None:
        """Record whether a module may draw random numbers, before its first call."""
        if id(type(module.torch())) in _CALM:
            self._calm.add(module.id)

    def enter(self, module: Module) -> None:
        """Record the modes of torch, and the generators' states if needed, when a module is entered."""
        number = module.id
        random = {} if number in self._calm else _random()
        autocast = _autocast() if _any_autocast() else {}
        state = State(random, _is_grad_enabled(), _is_inference(), autocast)
        self._entered[get_ident(), number] = state

    def left(self, module: Module) -> State | None:
        """Return the recorded state, and forget it."""
        return self._entered.pop((get_ident(), module.id), None)


class LastCalls:
    """The last call of each model in a step, with the gradients that reached its outputs."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}  # by module.id, the last call last
        self._reached: dict[int, dict[int, tuple[Tensor, int]]] = {}  # by the position of the output, with its version

    def keep(self, call: Call) -> None:
        """Keep the arguments of a model's call until the model is called again or the step ends."""
        earlier = self._calls.pop(call.module.id, None)
        number = 1 if earlier is None else earlier.number + 1
        self._calls[call.module.id] = call._replace(output=None, number=number)
        self._reached[call.module.id] = {}

    def forget(self, module: Module) -> None:
        """Drop the call of a model that was called again, by another one."""
        self._calls.pop(module.id, None)
        self._reached.pop(module.id, None)

    def reached(self, module: Module, gradients: tuple[Any, ...]) -> None:
        """Record gradients of the outputs of a model's last call; they may come in parts."""
        if module.id in self._calls:
            known = {at: (g, g._version) for at, g in enumerate(gradients) if g is not None}  # noqa: SLF001
            self._reached[module.id].update(known)

    def with_gradient(self) -> Iterator[Call]:
        """Yield the calls that a gradient has reached, unless it was changed in place; the last call first."""
        for number, call in reversed(self._calls.items()):
            reached = self._reached[number]
            if reached and all(g._version == was for g, was in reached.values()):  # noqa: SLF001
                gradient = (reached.get(at, (None, 0))[0] for at in range(max(reached) + 1))
                yield call._replace(gradient=tuple(gradient))

    def clear(self) -> None:
        """Drop everything at the end of a step."""
        self._calls.clear()
        self._reached.clear()


def _random() -> dict[str, Tensor]:
    found = {"cpu": torch.default_generator.get_state()}
    if _cuda_is_initialized() and not torch.cuda.is_current_stream_capturing():
        at = torch.cuda.current_device()
        found[f"cuda:{at}"] = torch.cuda.default_generators[at].get_state()  # 16 bytes in host memory: no sync
    return found


def _autocast() -> dict[str, Autocast]:
    """Return the dtype of autocast for each device on which it is on."""
    found: dict[str, Autocast] = {}
    for device in ("cpu", "cuda"):
        if hasattr(torch, "get_autocast_dtype"):  # torch 2.4+
            is_on, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        elif device == "cpu":
            is_on, dtype = torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()
        else:
            is_on, dtype = torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()
        if is_on:
            found[device] = {"dtype": str(dtype)[6:], "cache": torch.is_autocast_cache_enabled()}
    return found
