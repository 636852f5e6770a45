"""More trainings with one mistake, and the same without it: numbers that leave their range, and models that are put together wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from tests.faults.learning.trainings import Classifier, batch, learn

if TYPE_CHECKING:
    from collections.abc import Iterable

    Steps = Iterable[int]


def cleared_too_late(steps: Steps, *, is_wrong: bool) -> None:
    """Clear the gradients between the backward and the step."""
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps:
        x, y = batch()
        if not is_wrong:
            optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if is_wrong:
            optimizer.zero_grad()
        optimizer.step()


def wrapped_loss(steps: Steps, *, is_wrong: bool) -> None:
    """Copy the value of the loss into a new tensor that requires a gradient, so that `backward` does not fail."""
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps:
        x, y = batch()
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        (torch.tensor(loss.item(), requires_grad=True) if is_wrong else loss).backward()
        optimizer.step()


def parameter_replaced(steps: Steps, *, is_wrong: bool) -> None:
    """Replace the parameters of a layer after the optimizer was made."""
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters())
    with torch.no_grad():
        values = 0.1 * torch.randn(4, 32)
        if is_wrong:
            model.head.weight = nn.Parameter(values)
        else:
            model.head.weight.copy_(values)
    for _ in steps:
        learn(model, optimizer)


def plain_list(steps: Steps, *, is_wrong: bool) -> None:
    """Keep layers in a plain list, so that `parameters()` omits theirs."""

    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(8, 8) for _ in range(3)]
            self.layers = layers if is_wrong else nn.ModuleList(layers)
            self.head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x)) + x
            return self.head(x)

    model = Stacked()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps:
        learn(model, optimizer)


def schedule_over(steps: Steps, *, is_wrong: bool) -> None:
    """Train on after the schedule has reached a learning rate of 0."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    total = 60 if is_wrong else 4000
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    for _ in steps:
        learn(model, optimizer)
        schedule.step()


def warmup_from_nothing(steps: Steps, *, is_wrong: bool) -> None:
    """Warm up from 0, and never call the schedule's `step`."""
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + (not is_wrong)) / 50))
    for _ in steps:
        learn(model, optimizer)
        if not is_wrong:
            schedule.step()


def block_without_gradients(steps: Steps, *, is_wrong: bool) -> None:
    """Compute a part of the model under `no_grad`, to save memory."""

    class Model(Classifier):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(not is_wrong):
                hidden = self.backbone(x)
            return self.head(self.drop(hidden))

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps:
        learn(model, optimizer)


def unscaled_inputs(steps: Steps, *, is_wrong: bool) -> None:
    """Feed pixels from 0 to 255 to a network of tanh, without normalization."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in steps:
        pixels = torch.randint(0, 256, (32, 64)).float()
        y = (pixels[:, 0] // 64).long()
        optimizer.zero_grad()
        cross_entropy(model(pixels if is_wrong else pixels / 128 - 1), y).backward()
        optimizer.step()


def too_deep_for_sigmoids(steps: Steps, *, is_wrong: bool) -> None:
    """Stack twelve layers of sigmoids."""
    activation = nn.Sigmoid if is_wrong else nn.ReLU
    layers: list[nn.Module] = [nn.Linear(8, 32), activation()]
    for _ in range(11):
        layers += [nn.Linear(32, 32), activation()]
    model = nn.Sequential(*layers, nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in steps:
        learn(model, optimizer)


def log_of_nothing(steps: Steps, *, is_wrong: bool) -> None:
    """Take the log of a probability that underflows to 0 in one sample at step 60, without a lower bound."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in steps:
        x, y = batch()
        if step == 60:
            x[0] *= 1000.0
            y[0] = (y[0] + 1) % 4
        optimizer.zero_grad()
        probabilities = model(x).softmax(-1)[torch.arange(32), y]
        (probabilities if is_wrong else probabilities.clamp_min(1e-3)).log().mean().neg().backward()
        optimizer.step()


def root_of_nothing(steps: Steps, *, is_wrong: bool) -> None:
    """Take the root of a distance that is 0 at step 60: its derivative is infinite, and times 0 a NaN."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in steps:
        x = torch.randn(32, 8)
        target = model(x).detach() if step == 60 else torch.randn(32, 8)
        square = (model(x) - target).square().sum(-1)
        optimizer.zero_grad()
        (square if is_wrong else square + 1e-6).sqrt().mean().backward()
        optimizer.step()


def constant_batch(steps: Steps, *, is_wrong: bool) -> None:
    """Normalize each batch by its own standard deviation, which is 0 for a constant column at step 60."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in steps:
        x = torch.randn(32, 8)
        if step == 60:
            x[:, 3] = 0.0
        x = (x - x.mean(0)) / (x.std(0) + (0.0 if is_wrong else 1e-6))
        optimizer.zero_grad()
        mse_loss(model(x), torch.zeros(32, 1)).backward()
        optimizer.step()


def unclipped_recurrence(steps: Steps, *, is_wrong: bool) -> None:
    """Train a recurrent network over 60 steps of time with large weights, without clipping the gradients."""
    model = nn.RNN(4, 16, batch_first=True, nonlinearity="relu")
    head = nn.Linear(16, 1)
    with torch.no_grad():
        model.weight_hh_l0.copy_(torch.eye(16) * 0.9)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
    for step in steps:
        if step == 60 and is_wrong:
            with torch.no_grad():
                model.weight_hh_l0.copy_(torch.eye(16) * 1.25)
        x = torch.randn(16, 60, 4)
        optimizer.zero_grad()
        mse_loss(head(model(x)[0][:, -1]), x[:, :, 0].mean(1, keepdim=True)).backward()
        if not is_wrong:
            nn.utils.clip_grad_norm_([*model.parameters(), *head.parameters()], 1.0)
        optimizer.step()


def half_overflow(steps: Steps, *, is_wrong: bool) -> None:
    """Compute attention scores in float16 without dividing them by the root of the width."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k = self.query(x) * 40, self.key(x) * 40
            scores = (q if is_wrong else q / 64**0.5 / 40).half() @ k.half().transpose(-1, -2)
            return scores.float().softmax(-1) @ x

    model = nn.Sequential(Attention(), nn.Linear(64, 1))
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.mul_(4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in steps:
        optimizer.zero_grad()
        model(torch.randn(4, 16, 64)).square().mean().backward()
        optimizer.step()


def frozen_statistics(steps: Steps, *, is_wrong: bool) -> None:
    """Put BatchNorm into `eval()` before it has seen any data, and train the rest."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in steps:
        model.train()
        if is_wrong:
            model.backbone[1].eval()
        learn(model, optimizer)
