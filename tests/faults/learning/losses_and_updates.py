"""Trainings whose loss gets what it does not expect, or whose updates come to nothing, and the same done right."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, nll_loss

from tests.faults.learning.trainings import Classifier, batch, learn

if TYPE_CHECKING:
    from collections.abc import Iterable

    Steps = Iterable[int]


def softmax_before_cross_entropy(steps: Steps, *, is_wrong: bool) -> None:
    """End the model in a softmax, and give its outputs to `cross_entropy`, which applies one itself."""
    model = nn.Sequential(Classifier(), nn.Softmax(-1) if is_wrong else nn.Identity())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps:
        learn(model, optimizer)


def sigmoid_before_logits(steps: Steps, *, is_wrong: bool) -> None:
    """Pass the output of a sigmoid to `binary_cross_entropy_with_logits`, which applies one itself."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps:
        x, y = batch()
        optimizer.zero_grad()
        output = model(x).squeeze(-1)
        binary_cross_entropy_with_logits(output.sigmoid() if is_wrong else output, (y % 2).float()).backward()
        optimizer.step()


def likelihood_of_probabilities(steps: Steps, *, is_wrong: bool) -> None:
    """Pass the probabilities of a softmax to `nll_loss`, which expects their logarithms."""
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps:
        x, y = batch()
        optimizer.zero_grad()
        probabilities = model(x).softmax(-1)
        nll_loss(probabilities if is_wrong else probabilities.clamp_min(1e-6).log(), y).backward()
        optimizer.step()


def likelihood_of_logits(steps: Steps, *, is_wrong: bool) -> None:
    """Pass the output of the last layer to `nll_loss`: the `log_softmax` in between was forgotten."""
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps:
        x, y = batch()
        optimizer.zero_grad()
        logits = model(x)
        nll_loss(logits if is_wrong else logits.log_softmax(-1), y).backward()
        optimizer.step()


def one_class(steps: Steps, *, is_wrong: bool) -> None:
    """Separate two classes by `cross_entropy` of one output: its softmax is always 1."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1 if is_wrong else 2))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps:
        x, y = batch()
        optimizer.zero_grad()
        cross_entropy(model(x), y * 0 if is_wrong else y % 2).backward()
        optimizer.step()


def cut_logits(steps: Steps, *, is_wrong: bool) -> None:
    """Put a ReLU behind the last layer of a classifier, as behind all others."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4), nn.ReLU() if is_wrong else nn.Identity())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps:
        learn(model, optimizer)


def column_and_row(steps: Steps, *, is_wrong: bool) -> None:
    """Subtract a row of targets from a column of outputs: each output is compared with every target."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps:
        x, _ = batch()
        output, target = model(x), x.sum(-1)
        optimizer.zero_grad()
        ((output if is_wrong else output.squeeze(-1)) - target).square().mean().backward()
        optimizer.step()


def column_and_row_of_mse(steps: Steps, *, is_wrong: bool) -> None:
    """The same with `mse_loss`, whose warning is lost in the log."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps:
        x, _ = batch()
        output, target = model(x), x.sum(-1)
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mse_loss(output if is_wrong else output.squeeze(-1), target).backward()
        optimizer.step()


def no_step(steps: Steps, *, is_wrong: bool) -> None:
    """Forget `optimizer.step()`."""
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in steps:
        x, y = batch()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if not is_wrong:
            optimizer.step()


def masked_row(steps: Steps, *, is_wrong: bool) -> None:
    """Mask all keys of a query that is padding, at step 60: the softmax of nothing is NaN."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
            scores = self.query(x) @ x.transpose(-1, -2)
            scores = scores.masked_fill(is_padding[:, None, :], float("-inf") if is_wrong else -1e9)
            return scores.softmax(-1) @ self.value(x)

    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in steps:
        x = torch.randn(4, 6, 8)
        is_padding = torch.zeros(4, 6, dtype=torch.bool)
        is_padding[:, 4:] = True
        if step == 60:
            is_padding[2] = True
        optimizer.zero_grad()
        model(x, is_padding).square().mean().backward()
        optimizer.step()


def empty_mask(steps: Steps, *, is_wrong: bool) -> None:
    """Take the mean over the valid elements of a batch that has none, at step 60."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in steps:
        x = torch.randn(32, 8)
        is_valid = torch.rand(32) < (0.0 if step == 60 else 0.5)
        errors = (model(x).squeeze(-1) - x.sum(-1)).square() * is_valid
        optimizer.zero_grad()
        (errors.sum() / (is_valid.sum() if is_wrong else is_valid.sum().clamp_min(1))).backward()
        optimizer.step()


def branch_not_taken(steps: Steps, *, is_wrong: bool) -> None:
    """Select between a logarithm and 0 by `torch.where`: the gradient of the branch that is not taken is NaN, at step 60."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in steps:
        output = model(torch.randn(32, 8)).abs() + 0.1
        if step == 60:
            output = output * torch.tensor([0.0] + [1.0] * 7)
        optimizer.zero_grad()
        safe = output if is_wrong else output.clamp_min(1e-3)
        torch.where(output > 0, safe.log() * safe.sqrt(), 0.0).square().mean().backward()
        optimizer.step()


def adam_without_epsilon(steps: Steps, *, is_wrong: bool) -> None:
    """Set the epsilon of Adam to 0: an embedding that is not used has 0 divided by 0 as its update."""
    model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), eps=0.0 if is_wrong else 1e-8)
    for _ in steps:
        words = torch.randint(0, 40, (16, 4))
        optimizer.zero_grad()
        cross_entropy(model(words), words[:, 0] % 2).backward()
        optimizer.step()


def exponential_of_everything(steps: Steps, *, is_wrong: bool) -> None:
    """Compute a softmax by hand, without subtracting the maximum, where all logits are large at step 60."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in steps:
        x, y = batch()
        logits = model(x) + (100.0 if step == 60 else 0.0)
        exponentials = (logits if is_wrong else logits - logits.max(-1, keepdim=True).values.detach()).exp()
        optimizer.zero_grad()
        nll_loss((exponentials / exponentials.sum(-1, keepdim=True) + 1e-6).log(), y).backward()
        optimizer.step()


def zeros_everywhere(steps: Steps, *, is_wrong: bool) -> None:
    """Initialize all weights with zeros: no gradient ever gets past the last layer."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    if is_wrong:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in steps:
        learn(model, optimizer)


def relu_at_the_end(steps: Steps, *, is_wrong: bool) -> None:
    """Regress negative numbers with a model that ends in a ReLU."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4), nn.ReLU() if is_wrong else nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in steps:
        x, _ = batch()
        optimizer.zero_grad()
        mse_loss(model(x), -4 - x[:, :4].abs()).backward()
        optimizer.step()


def rounded_away(steps: Steps, *, is_wrong: bool) -> None:
    """Train parameters in bfloat16 with a small learning rate: each update is less than half of their last bit."""
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    if is_wrong:
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.0)
    for _ in steps:
        x, y = batch()
        optimizer.zero_grad()
        cross_entropy(model(x.to(model[0].weight.dtype)).float(), y).backward()
        optimizer.step()


def clipped_to_nothing(steps: Steps, *, is_wrong: bool) -> None:
    """Clip the gradients to a norm of 0, a default that was never set."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in steps:
        x, y = batch()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.0 if is_wrong else 1.0)
        optimizer.step()


def rate_halved_each_step(steps: Steps, *, is_wrong: bool) -> None:
    """From step 60 on, step a scheduler meant for epochs at every step: soon the learning rate is too small to change anything."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5 if is_wrong else 0.9999)
    for step in steps:
        x, y = batch()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if step >= 60:
            scheduler.step()


def weight_of_the_loss_gone(steps: Steps, *, is_wrong: bool) -> None:
    """From step 60 on, weigh the loss with 0, the end of an annealing that went too far."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        x, y = batch()
        optimizer.zero_grad()
        (cross_entropy(model(x), y) * (0.0 if is_wrong and step >= 60 else 1.0)).backward()
        optimizer.step()


def underflow_in_half(steps: Steps, *, is_wrong: bool) -> None:
    """Train in float16 without scaling the loss: the gradients are too small for it, and become 0."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).half()
    scale = 1.0 if is_wrong else 1e4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in steps:
        x, y = batch()
        optimizer.zero_grad()
        loss = 1e-6 * cross_entropy(model(x.half()).float(), y)
        (loss * scale).backward()
        optimizer.step()


def wrong_optimizer_cleared(steps: Steps, *, is_wrong: bool) -> None:
    """Train two models, and clear the gradients of one of them twice."""
    one, other = Classifier(), Classifier()
    first, second = (torch.optim.SGD(model.parameters(), lr=1e-3) for model in (one, other))
    for _ in steps:
        learn(one, first)
        x, y = batch()
        (first if is_wrong else second).zero_grad()
        cross_entropy(other(x), y).backward()
        second.step()


def prediction_in_between(steps: Steps, *, is_wrong: bool) -> None:
    """Log a prediction before each step by a function that calls `eval()`, and does not undo it."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def predict() -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            return model(batch()[0]).argmax(-1)

    for _ in steps:
        predict()
        if not is_wrong:
            model.train()
        learn(model, optimizer)


def climbing(steps: Steps, *, is_wrong: bool) -> None:
    """Maximize a squared error, because a sign is wrong."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in steps:
        x, _ = batch()
        optimizer.zero_grad()
        loss = mse_loss(model(x), x.sum(-1, keepdim=True))
        (-loss if is_wrong else loss).backward()
        optimizer.step()


def still_scaled(steps: Steps, *, is_wrong: bool) -> None:
    """Scale the loss for mixed precision, and step with gradients that are still scaled."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in steps:
        x, _ = batch()
        optimizer.zero_grad()
        (1024 * mse_loss(model(x), x.sum(-1, keepdim=True))).backward()
        if not is_wrong:
            for parameter in model.parameters():
                parameter.grad /= 1024
        optimizer.step()
