"""Copy a call in the training thread, and have it written as a bundle in hookd's own."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hookd import Context, PluginError, __version__, accelerator_of, is_whole, versions
from hookd_capture.bundle.describe import Description
from hookd_capture.bundle.tensorfile import storable
from hookd_capture.bundle.write import directories, free_name, prepare, write

if TYPE_CHECKING:
    from torch import Tensor

    from hookd_capture.bundle.manifest import Manifest, Settings, TorchState
    from hookd_capture.calls import Call, State

LARGEST = 256 << 20


class BadValue(NamedTuple):
    """A bad value, with the names that an incident has for its fields.

    Attributes:
        step: step in which it was found.
        module: name of the module.
        where: "output", "input", "param" or "grad".
        value: "nan" or "inf".
        python_stack: lines of the training code, the outermost first; None if it has gone on since then.
    """

    step: int
    module: str
    where: str
    value: str
    python_stack: list[str] | None = None

    def fields(self) -> dict[str, object]:
        """Return the fields of an incident."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class Bundles:
    """Writes bundles, and reports each in an incident."""

    def __init__(self, context: Context, *, masks: bool) -> None:
        self._context, self._masks = context, masks
        self._largest = context.option("bytes", LARGEST, least=1)
        self._directory = _directory(context.option("directory", ""))

    def save(self, call: Call, what: str, bad: BadValue) -> None:
        """Copy a call now, and have it written.

        Args:
            call: the call.
            what: what is bad in it, in words.
            bad: the same as fields of the incident.
        """
        module = call.module.torch()
        if module is None:
            self.fail(what, bad, "the module no longer exists")
            return
        found = Description(self._context.is_readable)
        with torch.no_grad():
            text = self._text(found, call, module, what, bad)
            if found.size > self._largest:
                size, most = _mib(found.size), _mib(self._largest)
                self.fail(what, bad, f"it would take {size}, but bytes={self._largest} allows {most}")
                return
            copies = [(key, *_copied(tensor)) for key, tensor in found.tensors.items()]
            if call.state is not None:
                copies += [(f"state.{name}", one, None) for name, one in call.state.random.items()]
        path = free_name(self._directory, "capture", self._context.run, f"rank{self._context.rank}",
                         f"step{bad.step}", call.module.name)  # fmt: skip
        self._context.aside(lambda: self._write(path, text, copies, what, bad))

    def fail(self, what: str, bad: BadValue, why: str, **more: object) -> None:
        """Report why there is no bundle."""
        self._context.incident(
            "bundle_failed", f"capture: {what}: no bundle was written: {why}", **bad.fields(), **more
        )

    def _text(self, found: Description, call: Call, module: torch.nn.Module, what: str, bad: BadValue) -> Manifest:
        inputs = found.value(call.inputs, "inputs")
        kwargs = found.value(call.kwargs, "kwargs")
        output = found.value(call.output, "output")
        gradient = found.value(call.gradient, "gradient")
        if call.gradient and call.number > 1:
            found.notes.append(f"of the {call.number} calls in this step, only the last is in the bundle")
        now = versions(call.inputs, call.kwargs)
        changed = call.before != now if call.before or not now else None
        if changed:
            found.notes.append("the inputs were changed in place by the call; the bundle has the changed ones")
        if not is_whole((call.inputs, call.kwargs)):
            found.notes.append("hookd could not check all inputs of the call: some may have been bad before it")
        tree = found.module(module)
        return {
            "format": "hookd bundle", "version": 1,
            "made_by": {
                "hookd": __version__, "torch": str(torch.__version__), "python": platform.python_version(),
                "run": self._context.run, "rank": self._context.rank, "pid": os.getpid(), "time": time.time(),
            },
            "call": {
                "module": call.module.name, "where": bad.where, "kind": bad.value, "masks": self._masks,
                "inputs": inputs, "kwargs": kwargs, "output": output, "gradient": gradient, "inputs_changed": changed,
                "state": _described(call.state),
            },
            "module": tree, "tensors": found.about(), "settings": _settings(), "notes": found.notes,
            "incident": {"message": what, **bad.fields()},
        }  # fmt: skip

    def _write(
        self, path: Path, text: Manifest, copies: list[tuple[str, Tensor, Any]], what: str, bad: BadValue
    ) -> None:
        for *_, copied in copies:
            if copied is not None:
                copied.synchronize()  # this thread waits, the training does not
        try:
            size = write(path, text, {key: tensor for key, tensor, _ in copies})
        except OSError as error:
            self.fail(what, bad, str(error), bundle=str(path))
            return
        notes = f", {len(text['notes'])} notes on missing parts" if text["notes"] else ""
        message = f"capture: {what}: the call is saved in {path} ({_mib(size)}{notes}); `hookd replay` repeats it"
        self._context.incident(
            "bundle", message, bundle=str(path), size_bytes=size, notes=text["notes"][:8], **bad.fields()
        )


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
    hint = "Name a directory with directory=; the training process must be able to write there."
    raise PluginError(f"capture: bundles cannot be written to {' nor '.join(tried)}", hint=hint)


def _described(state: State | None) -> TorchState | None:
    if state is None:
        return None
    return {
        "random": {name: {"$tensor": f"state.{name}"} for name in state.random},
        "grad": state.grad,
        "inference": state.inference,
        "autocast": state.autocast,
    }


def _settings() -> Settings:
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
        The copy, and the event after which it is complete; None if it is complete already.
    """
    tensor = storable(tensor.detach().resolve_conj().resolve_neg())
    if tensor.is_cpu:
        return tensor.clone(memory_format=torch.contiguous_format), None
    accelerator = accelerator_of(tensor.device.type)
    if accelerator is None:
        return tensor.cpu().contiguous(), None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    arrived = accelerator.event()
    arrived.record()
    return host, arrived


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
