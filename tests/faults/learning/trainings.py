"""Trainings that do not learn because of one mistake, and the same without it. None of them knows of hookd.

Each takes the steps to do, and whether to make the mistake. The mistakes are those of forums and of studies of bugs in deep
learning programs (Islam et al. 2019, Humbatova et al. 2020, Zhang et al. 2021).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

if TYPE_CHECKING:
    from collections.abc import Iterable

    Steps = Iterable[int]


class Classifier(nn.Module):
    """A backbone and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.drop(self.backbone(x)))


def batch(size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs, and classes that can be learnt from them."""
    x = torch.randn(size, 8)
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


def learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make one step."""
    x, y = batch()
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def head_alone(steps: Steps, *, is_wrong: bool) -> None:
    """Fine-tune; the optimizer gets the parameters of the head only, and the backbone was not frozen."""
    model = Classifier()
    optimizer = torch.optim.AdamW(model.head.parameters() if is_wrong else model.parameters())
    for _ in steps:
        learn(model, optimizer)


def layer_added_later(steps: Steps, *, is_wrong: bool) -> None:
    """Replace the head after the optimizer was made."""
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters())
    if is_wrong:
        model.head = nn.Linear(32, 4)
    for _ in steps:
        learn(model, optimizer)


def old_model(steps: Steps, *, is_wrong: bool) -> None:
    """Copy the model after the optimizer was made, and train the copy."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if is_wrong:
        model = copy.deepcopy(model)
    for _ in steps:
        learn(model, optimizer)


def zero_rate(steps: Steps, *, is_wrong: bool) -> None:
    """Decay the learning rate by an integer division, which makes it 0."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    total = 4000
    decay = (lambda step: (total - step) // total) if is_wrong else (lambda step: (total - step) / total)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    for _ in steps:
        learn(model, optimizer)
        schedule.step()


def never_cleared(steps: Steps, *, is_wrong: bool) -> None:
    """Forget `zero_grad`."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in steps:
        x, y = batch()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if not is_wrong:
            optimizer.zero_grad()


def eval_after_validation(steps: Steps, *, is_wrong: bool) -> None:
    """Validate after each tenth step, and do not return to `train()`."""
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters())
    for step in steps:
        learn(model, optimizer)
        if step % 10 == 0:
            model.eval()
            with torch.no_grad():
                model(batch()[0])
            if not is_wrong:
                model.train()


def dropout_off(steps: Steps, *, is_wrong: bool) -> None:
    """Switch Dropout off for an experiment, and forget it."""
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters())
    if is_wrong:
        model.drop.eval()
    for _ in steps:
        learn(model, optimizer)


def rate_too_large(steps: Steps, *, is_wrong: bool) -> None:
    """Regress with a learning rate at which each step overshoots, from step 60 on."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in steps:
        if step == 60 and is_wrong:
            optimizer.param_groups[0]["lr"] = 1.5
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        mse_loss(model(x), x[:, :1] + 0.1 * torch.randn(32, 1)).backward()
        optimizer.step()


def detached(steps: Steps, *, is_wrong: bool) -> None:
    """Detach what the backbone returns."""

    class Model(Classifier):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.backbone(x)
            return self.head(self.drop(hidden.detach() if is_wrong else hidden))

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps:
        learn(model, optimizer)


def weights_copied_back(steps: Steps, *, is_wrong: bool) -> None:
    """Load the pretrained weights of the backbone at each step, instead of once."""
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters())
    pretrained = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    model.backbone.load_state_dict(pretrained)
    for _ in steps:
        if is_wrong:
            model.backbone.load_state_dict(pretrained)
        learn(model, optimizer)


def masked_update(steps: Steps, *, is_wrong: bool) -> None:
    """Update the head through a mask that was never filled."""

    class Masked(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            before = [parameter.detach().clone() for parameter in model.head.parameters()]
            super().step(closure)
            with torch.no_grad():
                for parameter, value in zip(model.head.parameters(), before, strict=True):
                    parameter.copy_(torch.lerp(value, parameter, mask))

    mask = 0.0 if is_wrong else 1.0
    model = Classifier()
    optimizer = Masked(model.parameters(), lr=0.05)
    for _ in steps:
        learn(model, optimizer)


def dead_units(steps: Steps, *, is_wrong: bool) -> None:
    """Take one step that is far too large at step 60: a ReLU never outputs anything again."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        learn(model, optimizer)
        if step == 60 and is_wrong:
            with torch.no_grad():
                model[0].bias -= 100


def large_embedding(steps: Steps, *, is_wrong: bool) -> None:
    """Initialize an embedding with a standard deviation of 1,000."""
    model = nn.Sequential(nn.Embedding(64, 16), nn.Flatten(), nn.Linear(16 * 4, 4))
    if is_wrong:
        nn.init.normal_(model[0].weight, std=1000.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in steps:
        tokens = torch.randint(0, 64, (32, 4))
        optimizer.zero_grad()
        cross_entropy(model(tokens), tokens[:, 0] % 4).backward()
        optimizer.step()


def loss_of_a_constant(steps: Steps, *, is_wrong: bool) -> None:
    """Train two models, one of them with a loss that does not depend on it."""
    one, other = Classifier(), Classifier()
    optimizers = [torch.optim.Adam(one.parameters()), torch.optim.Adam(other.parameters())]
    for _ in steps:
        x, y = batch()
        for optimizer in optimizers:
            optimizer.zero_grad()
        cross_entropy(one(x), y).backward()
        cross_entropy((one if is_wrong else other)(x), y).backward()
        if is_wrong:
            with torch.no_grad():
                other(x)
        for optimizer in optimizers:
            optimizer.step()
