"""Repeat the call of a bundle in a new process, for `hookd replay`, and report the result.

    python -m hookd_capture.bundle.replay REQUEST ANSWER

Both files are JSON. The request has `bundle`, `allow`, `source` and `device`. The answer is what `result` returns, with `words`, or an
object with `error`, `reason`, `hint` and `exit_code`. The call is made twice: once as it was, to compare, and once with
every operation watched.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from hookd import HookdError, tensors
from hookd_capture.bundle.read import BundleError, Classes, Scene, dtype_of, read, same_bits
from hookd_capture.bundle.words import words

try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:  # before torch 1.13
    TorchDispatchMode = object  # type: ignore[assignment, misc, unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from hookd_capture.bundle.manifest import Manifest, Settings, TensorRecord, TorchState
    from hookd_capture.bundle.result import (
        CallSite,
        Count,
        FirstBad,
        JudgedOutcome,
        NamedCount,
        Outcome,
        Replayed,
        Request,
    )

FRAMES = 4
_USUAL: TorchState = {"random": {}, "grad": True, "inference": False, "autocast": {}}
"""The state of torch that is assumed if the bundle has none."""


def main(arguments: Sequence[str]) -> None:
    """Read the request and write the answer."""
    request = json.loads(Path(arguments[0]).read_text())
    try:
        found = result(request)
        answer = {**found, "words": words(found)}
    except HookdError as error:
        answer = {**error.as_json()}
    Path(arguments[1]).write_text(json.dumps(answer))


def result(request: Request) -> Replayed:
    """Replay a bundle.

    Raises:
        BundleError: it is invalid, or needs classes that must not be imported.
    """
    text, stored = read(Path(request["bundle"]))
    replay = Replay(text, stored, Classes(request["allow"], _path(request["source"])), request["device"])
    return cast("Replayed", {"bundle": request["bundle"], **replay.result()})


def _is_reproduced(found: Outcome) -> bool:
    """Whether the place that the incident names is bad again: an input, a parameter, a gradient or an output."""
    places = {"input": found["inputs"], "param": found["parameters"], "grad": found["gradients"]}
    return any(tensor["is_bad"] for tensor in places.get(found["where"], found["outputs"]))


def _missing(error: Exception) -> str:
    """Return an explanation of a missing name in a script, "" for any other error."""
    if not isinstance(error, NameError) or isinstance(error, UnboundLocalError):
        return ""
    return (
        "; only imports, classes, functions and assignments without a call are run of a --source script: with --source,"
        " name a file that defines this name in one of these ways"
    )


def _path(source: str | None) -> Path | None:
    return Path(source) if source else None


class Replay:
    """A bundle, and the settings of its replay."""

    def __init__(self, text: Manifest, stored: dict[str, Tensor], classes: Classes, device: str | None) -> None:
        self._text, self._stored, self._classes = text, stored, classes
        try:
            call = text["call"]
            self._state, self._step, self._changed = call["state"], text["incident"].get("step"), call["inputs_changed"]
            self._reported = {"module": str(call["module"]), "where": str(call["where"]), "kind": str(call["kind"])}
            self._reported["class"] = str(text["module"].get("qualname"))
            self._masks, self._made_by = bool(call["masks"]), {k: str(v) for k, v in text["made_by"].items()}
            self._notes = [str(note) for note in text["notes"]]
            self._device = _device(device, text["tensors"], self._notes)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise BundleError(f"bundle.json is invalid: {type(error).__name__}: {error}") from error

    def result(self) -> JudgedOutcome:
        """Make the call, compare its output, and find the first bad value."""
        scene = self._scene()
        before = {"inputs": self._counts((scene.inputs, scene.kwargs)), "parameters": self._bad_of(scene.module)}
        output, raised = self._run(scene)
        outputs, recorded = tensors(output), tensors(scene.output)
        found = cast("Outcome", {
            **self._reported, "step": self._step, "inputs_changed": self._changed, "torch": str(torch.__version__), "made_by": self._made_by, "device": str(self._device), **before,
            "outputs": self._counts(outputs), "recorded": self._counts(recorded), "raised": raised,
            "gradients": self._bad_of(scene.module, gradients=True),
            "is_bit_equal": len(outputs) == len(recorded) and all(map(same_bits, outputs, recorded)),
            "is_output_known": scene.output is not None,
            "is_state_known": self._state is not None, "first": None if raised else self._first_bad(),
            "notes": self._notes + scene.notes,
        })  # fmt: skip
        return cast("JudgedOutcome", {**found, "is_reproduced": _is_reproduced(found)})

    def _scene(self) -> Scene:
        return Scene(self._text, self._stored, self._classes, self._device)

    def _run(self, scene: Scene, *watches: Any) -> tuple[Any, str | None]:
        """Call the module as it was called, and run the backward if there is a gradient.

        Returns:
            The output, None if the call raised; and the error, None if it did not.
        """
        with contextlib.ExitStack() as stack:
            self._enter(stack)
            for watch in watches:
                stack.enter_context(watch)
            try:
                output = scene.module(*scene.inputs, **scene.kwargs)
                _go_back(output, scene.gradient)
                return output, None
            except Exception as error:  # noqa: BLE001 - the user's module, with parts possibly missing
                at = traceback.extract_tb(error.__traceback__)[-1]
                return None, f"{type(error).__name__}: {error} ({at.filename}:{at.lineno}){_missing(error)}"

    def _enter(self, stack: contextlib.ExitStack) -> None:
        """Put torch into the state in which the module was called.

        Raises:
            BundleError: the recorded state is impossible.
        """
        try:
            _set(self._text["settings"])
            state = self._state or _USUAL
            for device, what in state["random"].items():
                self._set_random(device, self._stored[what["$tensor"]])
            stack.enter_context(torch.inference_mode(mode=bool(state["inference"])))
            stack.enter_context(torch.set_grad_enabled(bool(state["grad"])))
            for device, how in state["autocast"].items():
                own = self._device.type if device == "cuda" else device
                cast = torch.autocast(own, dtype=dtype_of(how["dtype"]), cache_enabled=bool(how["cache"]))
                stack.enter_context(cast)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise BundleError(f"the state of the call cannot be restored: {type(error).__name__}: {error}") from error

    def _set_random(self, device: str, state: Tensor) -> None:
        if device == "cpu":
            torch.set_rng_state(state)
        elif self._device.type == "cuda":
            torch.cuda.set_rng_state(state, self._device)

    # -- numbers

    def _is_bad(self, tensor: Tensor) -> bool:
        """Whether a tensor has a NaN or an infinity; `-inf` does not count if it is taken for a mask."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return False
        values = _real(tensor)
        bad = values.isnan() | (values == float("inf")) if self._masks else ~values.isfinite()
        return bool(bad.any())

    def _counts(self, value: Any) -> list[NamedCount]:
        return [{"name": str(at), **self._count(one)} for at, one in enumerate(tensors(value))]

    def _count(self, tensor: Tensor) -> Count:
        values = _real(tensor)
        return {
            "shape": list(tensor.shape), "dtype": str(tensor.dtype)[6:], "elements": tensor.numel(),
            "nan_count": int(values.isnan().sum()), "inf_count": int(values.isinf().sum()),
            "is_bad": self._is_bad(tensor),
        }  # fmt: skip

    def _bad_of(self, module: torch.nn.Module, *, gradients: bool = False) -> list[NamedCount]:
        """Return the counts of the bad parameters and buffers, or of the bad gradients of parameters."""
        own: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
        if gradients:
            own = [(name, tensor.grad) for name, tensor in own if tensor.grad is not None]
        return [{"name": name, **self._count(tensor)} for name, tensor in own if self._is_bad(tensor)]

    def _first_bad(self) -> FirstBad | None:
        """Repeat the call with every operation watched; return the first that makes a bad value of good inputs."""
        if TorchDispatchMode is object:
            return None
        scene = self._scene()
        inside: list[str] = []
        for name, module in scene.module.named_modules():
            _follow(module, name or "(itself)", inside)
        watch = Watch(self._is_bad, self._count, inside)
        self._run(scene, watch)
        return watch.found


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Checks every operation until one makes a bad value of good inputs.

    Attributes:
        found: operation, module, counts of the bad tensor, and the innermost lines of Python; None until there is one.
    """

    def __init__(self, is_bad: Callable[[Tensor], bool], count: Callable[[Tensor], Count], inside: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._is_bad, self._count, self._inside = is_bad, count, inside
        self.found: FirstBad | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        """Run an operation and check its result."""
        kwargs = kwargs or {}
        is_watched = self.found is None and "empty" not in str(func)  # uninitialized memory may hold anything
        was_bad = is_watched and any(map(self._is_bad, tensors((args, kwargs))))
        made = func(*args, **kwargs)
        if is_watched and not was_bad:
            bad = next((one for one in tensors(made) if self._is_bad(one)), None)
            if bad is not None:
                self.found = {"operation": str(func), **self._where(), **self._count(bad)}
        return made

    def _where(self) -> CallSite:
        node = _node()
        if node is not None:
            lines = [f"the backward of an operation in its forward: {node.name()}"]
            return {"module": node.metadata.get(_MADE_IN, "(itself)"), "is_backward": True, "stack": lines}
        inside = self._inside[-1] if self._inside else "(itself)"
        return {"module": inside, "is_backward": False, "stack": _lines()}


_MADE_IN = "hookd_made_in"
_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)  # noqa: SLF001


def _follow(module: torch.nn.Module, name: str, inside: list[str]) -> None:
    """Keep `inside` up to date, and record in each autograd node the innermost module that made it."""

    def leave(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        inside.pop()
        due: list[Any] = [one.grad_fn for one in tensors(output)]
        while due:
            node = due.pop()
            if node is not None and _MADE_IN not in node.metadata:
                node.metadata[_MADE_IN] = name
                due += [following for following, _ in node.next_functions]

    module.register_forward_pre_hook(lambda *_: inside.append(name))
    module.register_forward_hook(leave)


def _go_back(output: Any, gradient: Sequence[Any]) -> None:
    """Run the backward from the recorded gradients of the outputs."""
    pairs = [(o, g) for o, g in zip(tensors(output), gradient) if g is not None and o.requires_grad]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


def _lines() -> list[str]:
    """Return the innermost lines of the module's own code, the outermost first."""
    found: list[str] = []
    for frame, line in traceback.walk_stack(None):
        name = frame.f_code.co_filename
        if name == __file__ and found:
            break
        of_torch = name.partition("/torch/")[2]
        if name != __file__ and (not of_torch or (of_torch.startswith("nn/") and of_torch != "nn/modules/module.py")):
            found.append(f"{name}:{line} {frame.f_code.co_name}")
    return found[FRAMES - 1 :: -1] if len(found) >= FRAMES else found[::-1]


def _real(tensor: Tensor) -> Tensor:
    """Return the values of a tensor in a dtype that all of torch's functions support."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


def _device(wanted: str | None, about: Mapping[str, TensorRecord], notes: list[str]) -> torch.device:
    """Return the requested device, or else the kind that the call was made on, if it exists here."""
    recorded = sorted({str(one["device"]) for one in about.values()} - {"cpu"})
    if wanted is not None:
        try:
            torch.empty(1, device=wanted)
        except (RuntimeError, AssertionError, ImportError) as error:
            raise BundleError(f"there is no device {wanted!r} here: {error}", reason="device") from None
        return torch.device(wanted)
    if recorded and recorded[0].startswith("cuda") and torch.cuda.is_available():
        return torch.device("cuda")
    if recorded:
        notes.append(f"the call was made on {', '.join(recorded)}, and is repeated on the CPU: the bits may differ")
    return torch.device("cpu")


def _set(settings: Settings) -> None:
    torch.set_num_threads(min(max(1, int(settings["threads"])), 4 * (os.cpu_count() or 1)))
    torch.set_default_dtype(dtype_of(settings["dtype"]))
    torch.set_float32_matmul_precision(settings["float32_matmul_precision"])
    torch.use_deterministic_algorithms(bool(settings["deterministic"]))


if __name__ == "__main__":
    main(sys.argv[1:])
