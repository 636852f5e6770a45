"""Small reproducible trainings for tests of plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer


class Training:
    """A model, its optimizer and one step of an ordinary training loop.

    Args:
        model: any module.
        batch: returns the positional inputs of a step by its number, from 0.
        loss: computes a scalar from the model's output; by default the mean of its squares.
        optimizer: by default SGD with a learning rate of 0.01.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Callable[[int], tuple[Any, ...]],
        loss: Callable[[Any], Tensor] | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        import torch

        self.model = model
        self.batch = batch
        self.loss = loss if loss is not None else _mean_square
        self.optimizer = optimizer if optimizer is not None else torch.optim.SGD(model.parameters(), lr=0.01)
        self.steps = 0

    def step(self) -> float:
        """Train one step and return its loss."""
        loss = self.loss(self.model(*self.batch(self.steps)))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.steps += 1
        return float(loss.detach())


def _mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def small() -> Training:
    """Create a training of five layers, `0` to `4`: Linear, ReLU, LayerNorm, Dropout and Linear, on batches of 4 x 8."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4)]
    inputs = torch.randn(16, 4, 8)
    return Training(nn.Sequential(*layers), lambda step: (inputs[step % len(inputs)],))


def many_modules(count: int = 200) -> Training:
    """Create a training of `count` layers, Linear (64 x 64) and ReLU in turn.

    Each layer does little work, so the overhead of hooks is greatest here.
    """
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.ReLU() if at % 2 else nn.Linear(64, 64) for at in range(count)]
    batch = torch.randn(32, 64)
    return Training(nn.Sequential(*layers), lambda _step: (batch,))


def transformer_block(width: int = 256, length: int = 64) -> Training:
    """Create a training of one torch encoder layer of this width with 8 heads, on batches of 8 sequences of this length."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    batch = torch.randn(8, length, width)
    return Training(nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True), lambda _step: (batch,))
