"""Check that a training gives bit-identical results with and without a plugin."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from typing import TYPE_CHECKING

from hookd.testing.target import FakeTarget
from hookd.testing.training import Training, small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from hookd.api.plugin import Plugin

    State = Mapping[str, object]
    """By its name in words, everything that a step changes."""

_NUMPY = "the state of numpy's random numbers"


def assert_bit_identical(
    *plugins: type[Plugin] | str, make: Callable[[], Training] = small, steps: int = 5, **options: object
) -> None:
    """Train with and without these plugins, and compare losses, weights, buffers, gradients and random numbers.

    Args:
        plugins: classes, or names of installed plugins.
        make: creates the training; it is called three times, with the same seed.
        steps: number of steps of each training.
        options: of the first plugin.

    Raises:
        AssertionError: the trainings differ, or even those without plugins do; the message has the first difference
            and its step.
    """
    difference = first_difference(plugins, make=make, steps=steps, options=options)
    assert not difference, difference


def first_difference(
    plugins: tuple[type[Plugin] | str, ...],
    *,
    make: Callable[[], Training] = small,
    steps: int = 5,
    options: Mapping[str, object] | None = None,
) -> str:
    """Return the first difference that these plugins make; "" if there is none."""
    plain, again = _trained(make, steps), _trained(make, steps)
    own = _compared(plain, again)
    if own:
        return f"without any plugin this training differs from itself: {own}"
    with FakeTarget(record=False) as target:
        drawn = _drawn_by_starting(target, plugins, options or {})
        if drawn:
            return f"starting the plugin has drawn random numbers: {drawn} differs"
        observed = _trained(make, steps)
        assert not target.errors, f"a hook raised: {target.logs}"
    return _compared(plain, observed)


def _drawn_by_starting(
    target: FakeTarget, plugins: tuple[type[Plugin] | str, ...], options: Mapping[str, object]
) -> str:
    """Start the plugins, call `tick` once, and return which random state has changed since; "" if none has."""
    with _kept_random():
        before = _random()
        target.start(*plugins, **options)
        target.tick()
        after = _random()
    return next((name for name in before if before[name] != after[name]), "")


def _compared(first: Sequence[State], second: Sequence[State]) -> str:
    for step, (before, after) in enumerate(zip(first, second, strict=True), 1):
        for name in {**before, **after}:
            is_new = name == _NUMPY and name not in before  # a plugin may import numpy
            if before.get(name) != after.get(name) and not is_new:
                return f"step {step}: {name} differs"
    return ""


def _trained(make: Callable[[], Training], steps: int) -> list[State]:
    import torch

    with _kept_random():
        torch.manual_seed(0)
        random.seed(0)
        with contextlib.suppress(ImportError):  # if it is installed, torch may import it in the first step
            import numpy.random

            numpy.random.seed(0)  # noqa: NPY002  the global state
        training = make()
        return [{"the loss": training.step().hex(), **dict(_state(training))} for _ in range(steps)]


@contextlib.contextmanager
def _kept_random() -> Iterator[None]:
    """Restore the random states afterwards, for the sake of the test."""
    import torch

    numpy = sys.modules.get("numpy.random")
    states = torch.get_rng_state(), random.getstate(), numpy.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy is not None:
            numpy.set_state(states[2])


def _random() -> dict[str, object]:
    """Return the random states of torch, Python and, if it is loaded, numpy."""
    import torch

    states: dict[str, object] = {
        "the state of torch's random numbers": _bytes(torch.get_rng_state()),
        "the state of Python's random numbers": random.getstate(),
    }
    if "numpy.random" in sys.modules:
        _, words, *rest = sys.modules["numpy.random"].get_state()
        states[_NUMPY] = (words.tobytes(), *rest)
    return states


def _state(training: Training) -> Iterator[tuple[str, object]]:
    import torch

    yield from _random().items()
    for name, tensor in training.model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            yield f"the weight {name}", _bytes(tensor)
    for name, parameter in training.model.named_parameters():
        if parameter.grad is not None:
            yield f"the gradient of {name}", _bytes(parameter.grad)


def _bytes(tensor: torch.Tensor) -> bytes:
    from hookd.target.tensors.host_memory import is_readable

    if not is_readable(tensor):  # empty, freed, or of a class that stores its elements elsewhere
        return repr((tensor.shape, tensor.dtype)).encode()
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())
