"""Copy a bad call for a bundle (`capture=true`), so that it can be made again.

Everything runs in the training thread except `_write`, which runs in hookd's own.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookd import Context, Module, PluginError, __version__, versions
from hookd_nan.bundle.describe import Description
from hookd_nan.bundle.tensorfile import storable
from hookd_nan.bundle.write import directories, free_name, prepare, write

if TYPE_CHECKING:
    from torch import Tensor

    from hookd_nan.judge import Event

LARGEST = 256 << 20
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
"""Classes whose forward draws no random numbers: reading the generators' state is most of the cost of `Capture.enter`."""
_CALM = frozenset(map(id, CALM))  # ids: a metaclass may define the hash of a class
_cuda_is_initialized: Any = torch.cuda.is_initialized
_is_grad_enabled, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", bool)  # noqa: SLF001 - torch 1.13+; there is no other


class State(NamedTuple):
    """The modes of torch when a module was entered, and the generators' states by device (`torch.get_rng_state`)."""

    random: dict[str, Tensor]
    grad: bool
    inference: bool
    autocast: dict[str, dict[str, Any]]


class Call(NamedTuple):
    """A call that has returned, with the training's own objects.

    It is kept until it is judged, at most to the end of the step. If it is kept for its backward, it has no output,
    because the output would keep the graph.
    """

    module: Module
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    before: tuple[int, ...]
    state: State | None
    gradient: tuple[Any, ...] = ()  # of the outputs, in their order; None for an output without one


class Capture:
    """Makes bundles: at most one for each incident, and so at most two.

    Attributes:
        is_on: the option `capture`; without it nothing here is called.
    """

    def __init__(self, context: Context, *, masks: bool) -> None:
        self._context, self._masks = context, masks
        self.is_on = context.option("capture", default=False)
        self._largest = context.option("capture_bytes", LARGEST)
        where = context.option("capture_dir", "")
        self._entered: dict[tuple[int, int], State] = {}
        self._calm: set[int] = set()  # by module.id
        self._held: Call | None = None
        self._reached: dict[int, tuple[Tensor, int]] = {}
        self._calls = 0
        if self._largest < 1:
            raise PluginError(f"nan: capture_bytes must be at least 1, not {self._largest}")
        self._directory = _directory(where) if self.is_on else None

    # -- the state at entry

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
        """Return the recorded state, and forget it.

        The state of a root is kept until its next entry, because two hooks are called for its return.
        """
        key = get_ident(), module.id
        return self._entered.pop(key, None) if module.depth else self._entered.get(key)

    # -- a model's last call, for its backward

    def hold(self, call: Call) -> None:
        """Keep the arguments of a model until it is called again or the step ends."""
        self._held = call
        self._reached.clear()
        self._calls += 1

    def let_go(self) -> None:
        """Drop everything at the end of a step."""
        self._held, self._calls = None, 0
        self._reached.clear()

    def reached(self, module: Module, gradients: tuple[Any, ...]) -> None:
        """Record gradients of the outputs of a model's last call; they may come in parts."""
        if self._held is not None and self._held.module is module:
            self._reached.update({at: (g, g._version) for at, g in enumerate(gradients) if g is not None})  # noqa: SLF001

    def held(self) -> Call | None:
        """Return the model's last call with the gradients that reached it; None if none did, or one was changed."""
        reached = self._reached
        if self._held is None or not reached or any(g._version != was for g, was in reached.values()):  # noqa: SLF001
            return None
        gradients = (reached.get(at, (None, 0))[0] for at in range(max(reached) + 1))
        return self._held._replace(gradient=tuple(gradients))

    # -- the moment

    def take(self, event: Event, incident: dict[str, Any]) -> dict[str, Any]:
        """Copy the call of an event, and have it written in the background.

        Args:
            event: the event that is reported.
            incident: its message and its fields.

        Returns:
            Fields to add to the incident: `bundle` or `no_bundle`.
        """
        call, module = event.call, event.call.module.torch() if event.call is not None else None
        if call is None or module is None:
            return {"no_bundle": _why_not(event)}
        found = Description(self._context.is_readable)
        with torch.no_grad():
            text = self._text(found, event, call, module)
            if found.size > self._largest:
                size, most = _mib(found.size), _mib(self._largest)
                why = f"it would take {size}, but capture_bytes={self._largest} allows {most}: nothing was written"
                return {"no_bundle": why}
            copies = [(key, *_copied(tensor)) for key, tensor in found.tensors.items()]
            state = call.state
            if state is not None:
                copies += [(f"state.{name}", one, None) for name, one in state.random.items()]
        assert self._directory is not None
        path = free_name(self._directory, "nan", self._context.run, f"rank{self._context.rank}", f"step{event.step}",
                         event.module)  # fmt: skip
        text["incident"] = incident
        self._context.aside(lambda: self._write(path, text, copies))
        return {"bundle": str(path)}

    def _text(self, found: Description, event: Event, call: Call, module: torch.nn.Module) -> dict[str, Any]:
        inputs = found.value(call.inputs, "inputs")
        kwargs = found.value(call.kwargs, "kwargs")
        output = found.value(call.output, "output")
        gradient = found.value(call.gradient, "gradient")
        if call.gradient and self._calls > 1:
            found.notes.append(f"of the {self._calls} calls in this step, only the last is in the bundle")
        now = versions(call.inputs, call.kwargs)
        changed = call.before != now if call.before or not now else None
        if changed:
            found.notes.append("the inputs were changed in place by the call; the bundle has the changed ones")
        tree = found.module(module)
        return {
            "format": "hookd bundle", "version": 1,
            "made_by": {
                "hookd": __version__, "torch": str(torch.__version__), "python": platform.python_version(),
                "run": self._context.run, "rank": self._context.rank, "pid": os.getpid(), "time": time.time(),
            },
            "call": {
                "module": call.module.name, "where": event.where, "kind": event.kind, "masks": self._masks,
                "inputs": inputs, "kwargs": kwargs, "output": output, "gradient": gradient, "inputs_changed": changed,
                "state": _described(call.state),
            },
            "module": tree, "tensors": found.about(), "settings": _settings(), "notes": found.notes,
        }  # fmt: skip

    def _write(self, path: Path, text: dict[str, Any], copies: list[tuple[str, Tensor, Any]]) -> None:
        for *_, copied in copies:
            if copied is not None:
                copied.synchronize()  # this thread waits, the training does not
        where = {"module": text["call"]["module"], "bundle": str(path)}
        try:
            size = write(path, text, {key: tensor for key, tensor, _ in copies})
        except OSError as error:
            self._context.incident("bundle_failed", f"nan: the bundle could not be written: {error}", **where)
            return
        notes = f", {len(text['notes'])} notes on missing parts" if text["notes"] else ""
        message = (
            f"nan: the call of {where['module']} is saved in {path} ({_mib(size)}{notes}); `hookd replay` repeats it"
        )
        self._context.incident("bundle", message, size_bytes=size, notes=text["notes"][:8], **where)


def _directory(where: str) -> Path:
    """Return the directory for bundles.

    Raises:
        PluginError: no directory can be written to.
    """
    tried = []
    for directory in [Path(where)] if where else directories():
        try:
            return prepare(directory)
        except OSError as error:
            tried.append(f"{directory} ({error.strerror})")
    hint = "Name a directory with capture_dir=; the training process must be able to write there."
    raise PluginError(f"nan: bundles cannot be written to {' nor '.join(tried)}", hint=hint)


def _why_not(event: Event) -> str:
    """Return the reason why there is no call for a bundle."""
    if event.where == "loss":
        return "the loss is computed by the training's own functions, not by a module"
    if event.is_late:
        return "the values were on a device: when hookd had read them, the module's inputs no longer existed"
    if event.where == "grad":
        return (
            "this backward was not checked: checking is expensive, and done as often as the budget allows;"
            " to check every step, set HOOKD_BUDGET=1 at the attach"
        )
    return "the module's inputs no longer existed when the bad value was found"


def _random() -> dict[str, Tensor]:
    found = {"cpu": torch.default_generator.get_state()}
    if _cuda_is_initialized() and not torch.cuda.is_current_stream_capturing():
        at = torch.cuda.current_device()
        found[f"cuda:{at}"] = torch.cuda.default_generators[at].get_state()  # 16 bytes in host memory: no sync
    return found


def _autocast() -> dict[str, dict[str, Any]]:
    """Return the dtype of autocast for each device on which it is on."""
    found = {}
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


def _described(state: State | None) -> dict[str, Any] | None:
    if state is None:
        return None
    random = {name: {"$tensor": f"state.{name}"} for name in state.random}
    return {"random": random, "grad": state.grad, "inference": state.inference, "autocast": state.autocast}


def _settings() -> dict[str, Any]:
    """Return the process-wide settings that decide the bits of a result."""
    return {
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype())[6:],
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _copied(tensor: Tensor) -> tuple[Tensor, Any]:
    """Copy a tensor to the host without waiting for its device.

    Returns:
        The copy, and the CUDA event after which it is complete; None if it is complete already.
    """
    tensor = storable(tensor.detach().resolve_conj().resolve_neg())
    if tensor.is_cpu:
        return tensor.clone(memory_format=torch.contiguous_format), None
    if not tensor.is_cuda:
        return tensor.cpu().contiguous(), None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return host, arrived


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
