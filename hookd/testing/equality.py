"""Whether a training goes the same way, bit for bit, with a plugin and without it."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from typing import TYPE_CHECKING, Any

from hookd.testing.target import FakeTarget
from hookd.testing.training import Training, small

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from hookd.api.plugin import Plugin

_NUMPY = "the state of numpy's random numbers"


def assert_bit_identical(
    *plugins: type[Plugin] | str, make: Callable[[], Training] = small, steps: int = 5, **options: object
) -> None:
    """Train with and without these plugins, and compare losses, weights, buffers, gradients and random numbers.

    Args:
        plugins: classes, or names of installed plugins.
        make: makes the training anew; it is called three times, with the same seed.
        steps: how many steps each is trained.
        options: of the first plugin.

    Raises:
        AssertionError: what differs first, and at which step. Also if the training differs from itself.
    """
    difference = first_difference(plugins, make=make, steps=steps, options=options)
    assert not difference, difference


def first_difference(
    plugins: tuple[type[Plugin] | str, ...],
    *,
    make: Callable[[], Training] = small,
    steps: int = 5,
    options: dict[str, object] | None = None,
) -> str:
    """Say what differs first with these plugins; "" if nothing does."""
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


def _drawn_by_starting(target: FakeTarget, plugins: tuple[type[Plugin] | str, ...], options: dict[str, object]) -> str:
    """Start, let `tick` come once, and say which random numbers the training would now find changed; "" if none."""
    with _kept_random():
        before = _random()
        target.start(*plugins, **options)
        target.tick()
        after = _random()
    return next((name for name in before if before[name] != after[name]), "")


def _compared(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    for step, (before, after) in enumerate(zip(one, other, strict=True), 1):
        for name in {**before, **after}:
            is_new = name == _NUMPY and name not in before  # a plugin may import numpy
            if before.get(name) != after.get(name) and not is_new:
                return f"step {step}: {name} differs"
    return ""


def _trained(make: Callable[[], Training], steps: int) -> list[dict[str, Any]]:
    import torch

    with _kept_random():
        torch.manual_seed(0)
        random.seed(0)
        with contextlib.suppress(ImportError):  # where it is there, something in torch may import it in the first step
            import numpy.random

            numpy.random.seed(0)  # noqa: NPY002  the state that everybody shares
        training = make()
        return [{"the loss": training.step().hex(), **dict(_state(training))} for _ in range(steps)]


@contextlib.contextmanager
def _kept_random() -> Iterator[None]:
    """Put the states of the random numbers back afterwards: those are of the test."""
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
    """Give the states of torch's, Python's and, where it is loaded, numpy's random numbers."""
    import torch

    found: dict[str, object] = {
        "the state of torch's random numbers": _bytes(torch.get_rng_state()),
        "the state of Python's random numbers": random.getstate(),
    }
    if "numpy.random" in sys.modules:
        _, words, *rest = sys.modules["numpy.random"].get_state()
        found[_NUMPY] = (words.tobytes(), *rest)
    return found


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

    if not is_readable(tensor):  # empty, freed, or of a class that has its numbers elsewhere
        return repr((tensor.shape, tensor.dtype)).encode()
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())
