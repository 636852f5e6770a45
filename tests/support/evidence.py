"""Everything that is visible of a training from outside, and must be the same with hookd and without it.

It reads modules and optimizers without running their code, so that looking changes nothing and is not counted either.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Seen = dict[str, Any]
    Step = Callable[[int], Any]
    Make = Callable[[], "tuple[nn.Module, Step]"]

TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_RAN: list[str] = []
_plainly = getattr(torch._C, "DisableTorchFunctionSubclass", None) or torch._C.DisableTorchFunction


def ran(what: str, *, draws: bool = True) -> None:
    """Record that code of the training's own has run, and give that an effect: it draws a random number."""
    _RAN.append(what)
    if draws:
        torch.rand(())


def take_notes() -> list[str]:
    """Return the notes since the last call."""
    notes = list(_RAN)
    _RAN.clear()
    return notes


def train(make: Make, steps: int, at: Callable[[int], object]) -> list[Seen]:
    """Train from the same seed each time; return what was visible after each step.

    Args:
        make: makes a model, and a function that takes a step of its training, given the step's number.
        steps: the number of steps.
        at: is called before each step, and once after the last one, to start and stop observing.
    """
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    take_notes()
    seen = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, step = make()
        for number in range(steps):
            at(number)
            result = _outcome(step, number)
            here = {**result, "its own code ran": take_notes(), "warnings": [_warned(one) for one in caught]}
            caught.clear()
            seen.append({**here, **_random(), **dict(_state(model))})
        at(steps)
    return seen


def difference(one: list[Seen], other: list[Seen]) -> str:
    """Return a description of the first difference, or "" if there is none."""
    for step, (before, after) in enumerate(zip(one, other, strict=True)):
        for name in {**before, **after}:
            if before.get(name) != after.get(name):
                return f"step {step}: {name}: {_short(before.get(name))} is now {_short(after.get(name))}"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 600 else f"{text[:300]}…{text[-300:]}"


def _outcome(step: Step, number: int) -> Seen:
    try:
        result = step(number)
    except Exception as error:  # noqa: BLE001 - it must be the same one
        return {"result": None, "raised": (type(error).__name__, str(error))}
    return {"result": _bits(result) if isinstance(result, torch.Tensor) else result, "raised": None}


def _warned(warning: warnings.WarningMessage) -> tuple[str, str]:
    return warning.category.__name__, str(warning.message)


def _random() -> Seen:
    found: Seen = {"torch's random state": _bits(torch.get_rng_state()), "python's random state": random.getstate()}
    if "numpy" in sys.modules:
        _, words, *rest = sys.modules["numpy"].random.get_state()
        found["numpy's random state"] = (words.tobytes(), *rest)
    return found


def _state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in _modules(model, "", set()):
        attributes = object.__getattribute__(module, "__dict__")
        # torch adds this one by itself when a module is pickled or compiled
        yield f"{path}'s own names", sorted(name for name in attributes if name != "_compiled_call_impl")
        yield f"{path}'s hooks", {name: len(value) for name, value in attributes.items() if name.endswith("_hooks")}
        yield f"{path} trains", attributes.get("training")
        for kind in ("_parameters", "_buffers"):
            for name, tensor in _entries(attributes.get(kind)):
                if tensor is not None:
                    yield f"{path}.{name}", _of_tensor(tensor)


def _modules(module: nn.Module, path: str, known: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) not in known:
        known.add(id(module))
        yield path or "the model", module
        for name, child in _entries(object.__getattribute__(module, "__dict__").get("_modules")):
            if child is not None:
                yield from _modules(child, f"{path}.{name}".lstrip("."), known)


def _entries(table: Any) -> Any:
    return list(dict.items(table)) if isinstance(table, dict) else list(table.items()) if table is not None else []


def _of_tensor(tensor: torch.Tensor) -> Any:
    with _plainly(), torch.no_grad():
        if issubclass(type(tensor), torch.nn.parameter.UninitializedTensorMixin):
            return "uninitialized"
        grad = torch.Tensor.grad.__get__(tensor)
        of_grad = None if grad is None else (_bits(grad), grad._version)
        hooks = [len(_not_ours(getattr(tensor, name, None))) for name in TENSOR_HOOKS]
        requires_grad = torch.Tensor.requires_grad.__get__(tensor)
        return type(tensor).__name__, requires_grad, tensor._version, hooks, _bits(tensor), of_grad


def _not_ours(hooks: Any) -> list[Any]:
    """Return the hooks that are not hookd's: a module that is never called may get gradients, so hookd keeps its hooks on it."""
    return [
        one for one in (hooks or {}).values() if not getattr(one, "__module__", "").startswith(("hookd.", "_hookd."))
    ]


def _bits(tensor: torch.Tensor) -> Any:
    with _plainly(), torch.no_grad():
        own = torch.Tensor.detach(tensor)
        dense = own.to_dense() if own.layout is not torch.strided else own.as_subclass(torch.Tensor)
        with contextlib.suppress(TypeError):  # bfloat16 has no numpy type
            return str(dense.dtype), tuple(dense.shape), dense.contiguous().numpy().tobytes()
        return str(dense.dtype), tuple(dense.shape), dense.float().contiguous().numpy().tobytes()
