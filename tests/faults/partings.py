"""Trainings of which a changed twin parts from the first, each at a known place, and what `hookd diff` says of them.

`python -m tests.faults.partings` writes the table of `docs/fingerprints.md`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hookd.tool.fingerprints import comparison, file, recording
from hookd.tool.fingerprints.steps import COMPARED
from hookd.wire.descriptors import Descriptor
from tests.support import titled_rows
from tests.support.agent import running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hookd.tool.fingerprints.comparison import Comparison

DOCUMENT = Path(__file__).parents[2] / "docs" / "fingerprints.md"
HEAD = "| The second run | What `hookd diff` said |\n|---|---|\n"
STEPS, PLANTED = 14, 8
"""Steps of each training, and the one in which most changes are made; the first ones are not recorded."""


class Net(nn.Module):
    """Two blocks with a norm and dropout, and a head."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16, eps=eps)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(16, 16)
        self.batch_norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Change what goes from the first block to the second, in twins."""
        return hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, 4] logits of [n, 8] inputs."""
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        return self.head(torch.relu(self.batch_norm(self.second(self.between(hidden)))))


class Data:
    """Batches in an order that a seed sets."""

    def __init__(self, seed: int = 0) -> None:
        made = torch.Generator().manual_seed(7)
        self.x = torch.randn(512, 8, generator=made)
        self.y = self.x[:, :4].argmax(1)
        self.order = torch.randperm(512, generator=torch.Generator().manual_seed(seed))
        self.at = 0

    def batch(self, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next batch."""
        rows = self.order[self.at : self.at + size]
        self.at += size
        return self.x[rows], self.y[rows]


def learn(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    *,
    scale: float = 1.0,
    clip: bool = False,
) -> None:
    """Make one step."""
    x, y = batch
    optimizer.zero_grad()
    (scale * cross_entropy(model(x), y)).backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def adam(model: nn.Module, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """Return the optimizer of all of these trainings."""
    return torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=weight_decay)


def data_order(*, is_changed: bool) -> None:
    """Shuffles the data in another order."""
    model, data = Net(), Data(1 if is_changed else 0)
    optimizer = adam(model)
    for _ in range(STEPS):
        learn(model, optimizer, data.batch())


def seed(*, is_changed: bool) -> None:
    """Initializes the model with another seed."""
    torch.manual_seed(1 if is_changed else 0)
    model, data = Net(), Data()
    optimizer = adam(model)
    for _ in range(STEPS):
        learn(model, optimizer, data.batch())


def dropout_state(*, is_changed: bool) -> None:
    """Draws a random number for a log line, before a step."""
    model, data = Net(), Data()
    optimizer = adam(model)
    for step in range(1, STEPS + 1):
        if is_changed and step == PLANTED:
            torch.rand(1)
        learn(model, optimizer, data.batch())


def one_ulp(*, is_changed: bool) -> None:
    """Has one weight changed by its last bit, between two steps."""
    model, data = Net(), Data()
    optimizer = adam(model)
    for step in range(1, STEPS + 1):
        if is_changed and step == PLANTED:
            with torch.no_grad():
                weight = model.second.weight
                weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
        learn(model, optimizer, data.batch())


class Gathering(nn.Module):
    """Adds rows up by an index."""

    def __init__(self, *, is_backwards: bool) -> None:
        super().__init__()
        self.is_backwards = is_backwards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of `x`, each with the sum of all rows at the same index added."""
        at = torch.arange(len(x)) % 3
        order = torch.arange(len(x)).flip(0) if self.is_backwards else torch.arange(len(x))
        sums = torch.zeros(3, x.shape[1]).index_add(0, at[order], x[order])
        return x + sums[at]


def order_of_a_sum(*, is_changed: bool) -> None:
    """Adds numbers up in another order in `index_add`, as threads do."""
    model, data = nn.Sequential(nn.Linear(8, 16), Gathering(is_backwards=is_changed), nn.Linear(16, 4)), Data()
    optimizer = adam(model)
    for _ in range(STEPS):
        learn(model, optimizer, data.batch())


class Brain(nn.Linear):
    """Computes in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what a linear layer returns, in bfloat16."""
        return nn.functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())


def layer_in_bfloat16(*, is_changed: bool) -> None:
    """Computes one layer in bfloat16."""
    model, data = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), Data()
    if is_changed:
        model[2].__class__ = Brain
    optimizer = adam(model)
    for _ in range(STEPS):
        x, y = data.batch()
        optimizer.zero_grad()
        cross_entropy(model(x).float(), y).backward()
        optimizer.step()


def epsilon(*, is_changed: bool) -> None:
    """Has another epsilon in a norm."""
    model, data = Net(1e-6 if is_changed else 1e-5), Data()
    optimizer = adam(model)
    for _ in range(STEPS):
        learn(model, optimizer, data.batch())


def weight_decay(*, is_changed: bool) -> None:
    """Has another weight decay."""
    model, data = Net(), Data()
    optimizer = adam(model, 0.1 if is_changed else 0.01)
    for _ in range(STEPS):
        learn(model, optimizer, data.batch())


def clipping(*, is_changed: bool) -> None:
    """Does not clip the gradients."""
    model, data = Net(), Data()
    optimizer = adam(model)
    for _ in range(STEPS):
        learn(model, optimizer, data.batch(), clip=not is_changed)


def stale_buffer(*, is_changed: bool) -> None:
    """Does not update the running mean of a BatchNorm after a validation."""
    model, data = Net(), Data()
    optimizer = adam(model)
    for step in range(1, STEPS + 1):
        learn(model, optimizer, data.batch())
        if is_changed and step == PLANTED:
            model.batch_norm.track_running_stats = False


def forgotten_optimizer(*, is_changed: bool) -> None:
    """Resumes with the weights of a checkpoint and a new optimizer."""
    model, data = Net(), Data()
    optimizer = adam(model)
    for step in range(1, STEPS + 1):
        if is_changed and step == PLANTED:
            optimizer = adam(model)
        learn(model, optimizer, data.batch())


def forgotten_sampler(*, is_changed: bool) -> None:
    """Resumes with the first batch of the epoch."""
    model, data = Net(), Data()
    optimizer = adam(model)
    for step in range(1, STEPS + 1):
        if is_changed and step == PLANTED:
            data.at = 0
        learn(model, optimizer, data.batch())


def accumulation(*, is_changed: bool) -> None:
    """Accumulates four micro-batches of 4 instead of a batch of 16."""
    model, data = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), Data()
    optimizer = adam(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(4 if is_changed else 1):
            x, y = data.batch(4 if is_changed else 16)
            (cross_entropy(model(x), y) / (4 if is_changed else 1)).backward()
        optimizer.step()


def fewer_micro_batches(*, is_changed: bool) -> None:
    """Accumulates two micro-batches of 4 instead of four."""
    model, data = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), Data()
    optimizer = adam(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2 if is_changed else 4):
            x, y = data.batch(4)
            (cross_entropy(model(x), y) / 4).backward()
        data.at += 8 if is_changed else 0
        optimizer.step()


def forgotten_train(*, is_changed: bool) -> None:
    """Does not return to `train()` after a validation."""
    model, data = Net(), Data()
    optimizer = adam(model)
    for step in range(1, STEPS + 1):
        learn(model, optimizer, data.batch())
        if step == PLANTED:
            model.eval()
            model.train(not is_changed)


def never_cleared(*, is_changed: bool) -> None:
    """Forgets `zero_grad()`."""
    model, data = Net(), Data()
    optimizer = adam(model)
    for _ in range(STEPS):
        if not is_changed:
            optimizer.zero_grad()
        cross_entropy(model(data.x[:16]), data.y[:16]).backward()
        optimizer.step()


class Pair(nn.Module):
    """Two layers of one size, called in either order."""

    def __init__(self, *, is_swapped: bool) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.is_swapped = is_swapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        first, second = (self.two, self.one) if self.is_swapped else (self.one, self.two)
        return self.head(torch.relu(second(torch.relu(first(x)))))


def swapped_layers(*, is_changed: bool) -> None:
    """Calls two layers in the other order."""
    model, data = Pair(is_swapped=is_changed), Data()
    optimizer = adam(model)
    for _ in range(STEPS):
        learn(model, optimizer, data.batch())


def scaled_loss(*, is_changed: bool) -> None:
    """Halves the loss."""
    model, data = Net(), Data()
    optimizer = adam(model)
    for _ in range(STEPS):
        learn(model, optimizer, data.batch(), scale=0.5 if is_changed else 1.0)


def frozen_layer(*, is_changed: bool) -> None:
    """Has a layer frozen."""
    model, data = Net(), Data()
    optimizer = adam(model)
    model.second.requires_grad_(not is_changed)
    for _ in range(STEPS):
        learn(model, optimizer, data.batch())


def average_of_a_teacher(*, is_changed: bool) -> None:
    """Moves the weights of a teacher further towards those of the student, after one step."""
    model, teacher, data = Net(), Net().requires_grad_(False), Data()
    optimizer = adam(model)
    for step in range(1, STEPS + 1):
        x, y = data.batch()
        optimizer.zero_grad()
        hint = teacher(x)
        (cross_entropy(model(x), y) + 0.1 * (model(x) - hint).square().mean()).backward()
        optimizer.step()
        share = 0.2 if is_changed and step == PLANTED - 1 else 0.1
        for ours, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs.detach(), share)


def renamed_layer(*, is_changed: bool) -> None:
    """Calls a layer otherwise, and has another weight decay."""
    model, data = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), Data()
    if is_changed:
        layers = list(model)
        model = nn.Sequential()
        for name, layer in zip(("entry", "tanh", "exit"), layers, strict=True):
            model.add_module(name, layer)
    optimizer = adam(model, 0.1 if is_changed else 0.0)
    for _ in range(STEPS):
        learn(model, optimizer, data.batch())


class Between(Net):
    """Changes a tensor in place between two modules."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Add a little to one element."""
        hidden[0, 0] += 1e-3
        return hidden


def change_between(*, is_changed: bool) -> None:
    """Changes a tensor in place between two modules."""
    model, data = Between() if is_changed else Net(), Data()
    optimizer = adam(model)
    for _ in range(STEPS):
        learn(model, optimizer, data.batch())


def noise_in_a_gradient(*, is_changed: bool) -> None:
    """Adds a number to one gradient in its backward, as a kernel that is not deterministic does."""
    model, data = Net(), Data()
    optimizer = adam(model)
    if is_changed:
        model.second.weight.register_hook(lambda grad: grad + 1e-6)
    for _ in range(STEPS):
        learn(model, optimizer, data.batch())


class Noisy(torch.autograd.Function):
    """Passes its input on, and adds a number to its gradient."""

    @staticmethod
    def forward(_: object, x: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return x.view_as(x)

    @staticmethod
    def backward(_: object, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient with a little more."""
        return grad + 1e-7


class NoisyNorm(nn.LayerNorm):
    """A norm with a backward that is not as it should be."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what a norm returns."""
        return super().forward(Noisy.apply(x))


def backward_of_a_module(*, is_changed: bool) -> None:
    """Has a kernel in the backward of a norm that is not deterministic."""
    model, data = Net(), Data()
    if is_changed:
        model.norm.__class__ = NoisyNorm
    optimizer = adam(model)
    for _ in range(STEPS):
        learn(model, optimizer, data.batch())


class NoisyBetween(Net):
    """Has a function between two modules with another backward."""

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return Noisy.apply(hidden)  # type: ignore[no-any-return]


def backward_between(*, is_changed: bool) -> None:
    """Has a function between two modules with another backward."""
    model, data = NoisyBetween() if is_changed else Net(), Data()
    optimizer = adam(model)
    for _ in range(STEPS):
        learn(model, optimizer, data.batch())


def one_of_two_ranks(*, is_changed: bool) -> None:
    """Is another rank, with batches of its own; the gradient of one parameter was left out of the all-reduce."""
    model, data, others = Net(), Data(1 if is_changed else 0), Data(0 if is_changed else 1)
    model.drop.p = 0.0
    model.batch_norm.track_running_stats = False
    optimizer = adam(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        gradients = []
        for of in (data, others):
            x, y = of.batch()
            gradients.append(torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters())))
        for name, parameter, own, other in zip(
            dict(model.named_parameters()), model.parameters(), *gradients, strict=True
        ):
            parameter.grad = own if name == "second.bias" else own + other
        optimizer.step()


def other_optimizer(*, is_changed: bool) -> None:
    """Steps with another implementation of the same optimizer, which rounds otherwise."""
    model, data = Net(), Data()
    optimizer = adam(model)

    class Rounding(torch.optim.Adam):
        def step(self, closure: object = None) -> None:
            super().step(closure)  # type: ignore[arg-type]
            with torch.no_grad():
                model.head.weight[0, 0] += 1e-6

    if is_changed:
        optimizer = Rounding(model.parameters(), lr=1e-3)
        optimizer.__class__.__name__ = "Adam"
    for _ in range(STEPS):
        learn(model, optimizer, data.batch())


class Parting(NamedTuple):
    """A pair of trainings.

    Attributes:
        train: makes the steps; its docstring says what the second one does.
        phase, name: where they part.
        words: that the sentence has.
        phases: that are compared.
        has_backward: whether gradients of inputs and outputs are recorded.
    """

    train: Callable[..., None]
    phase: str
    name: str
    words: str
    phases: tuple[str, ...] = COMPARED
    has_backward: bool = False


PARTINGS = [
    Parting(data_order, "data", "(root)", "the batches differ; the model had no part in it"),
    Parting(seed, "weights", "first.weight", "the runs begin with other weights"),
    Parting(
        dropout_state, "forward", "drop", f"Step {PLANTED}: same batch, same weights, another random state; drop is"
    ),
    Parting(one_ulp, "weights", "second.weight", f"Step {PLANTED}: the weights differ before it"),
    Parting(order_of_a_sum, "forward", "1", "1 is the first module whose output differs"),
    Parting(
        layer_in_bfloat16,
        "forward",
        "2",
        "2 is the first module whose output differs (float32 16x4 against bfloat16 16x4, norm ",
    ),
    Parting(epsilon, "forward", "norm", "norm is the first module whose output differs"),
    Parting(weight_decay, "settings", "weight_decay", "weight_decay 0.01 against 0.1"),
    Parting(clipping, "gradients", "", "all gradients of B are"),
    Parting(stale_buffer, "buffers", "batch_norm.running_mean", "the buffer batch_norm.running_mean differs"),
    Parting(
        forgotten_optimizer, "settings", "steps done", f"in step {PLANTED}: steps done {PLANTED - 1}.0 against 0.0"
    ),
    Parting(forgotten_sampler, "data", "(root)", f"Step {PLANTED}: the batches differ"),
    Parting(accumulation, "data", "(root)", "16x8 against float32 4x8"),
    Parting(fewer_micro_batches, "data", "(root)", "A calls (root) 4 times in this step, B 2 times"),
    Parting(
        forgotten_train,
        "data",
        "(root)",
        f"Step {PLANTED + 1}: same weights, same random state; A calls (root) once in this step, B not once",
    ),
    Parting(
        never_cleared,
        "gradients",
        "head.bias",
        "Step 2: same batch, same weights, same random state, forward and loss equal; the gradient of",
    ),
    Parting(swapped_layers, "forward", "one", "the input of one differs"),
    Parting(scaled_loss, "loss", "", "0.5 times"),
    Parting(frozen_layer, "gradients", "second.weight", "second.weight gets no gradient in B"),
    Parting(
        average_of_a_teacher,
        "weights",
        "#Net.first.weight",
        f"Step {PLANTED}: the weights differ before it, and did not after the step before",
    ),
    Parting(renamed_layer, "settings", "weight_decay", "weight_decay 0.0 against 0.1"),
    Parting(change_between, "forward", "second", "the input of second differs"),
    Parting(noise_in_a_gradient, "gradients", "second.weight", "the gradient of second.weight differs"),
    Parting(
        backward_of_a_module,
        "backward",
        "norm",
        "norm gets an equal gradient and passes on another one",
        has_backward=True,
    ),
    Parting(
        backward_between, "backward", "drop", "the gradient that reaches the output of drop differs", has_backward=True
    ),
    Parting(
        one_of_two_ranks,
        "gradients",
        "second.bias",
        "the gradient of second.bias differs",
        ("gradients", "update"),
    ),
    Parting(other_optimizer, "update", "head.weight", "head.weight differs after the step"),
]


def recorded(train: Callable[[], None], path: Path, **options: str) -> file.Fingerprint:
    """Train under plugin `fingerprint`, in this process, and return what was recorded, by way of a file."""
    torch.manual_seed(0)
    with running("fingerprint", options={"every": "1", **options}) as agent, recording.stream() as (reader, number):
        connection = SimpleNamespace(files=[Descriptor(os.dup(number))], is_gone=lambda: False, pid=os.getpid())
        agent.parts.streams._open("fingerprint", connection)
        train()
        with file.Writer(path, {"run": "train.py", "rank": 0}, 1 << 30) as writer:
            received = recording.Received(writer, is_whole=True)
            for data in reader.records():
                received.add(data)
    return file.read(path)


@contextlib.contextmanager
def both(train: Callable[..., None], **options: str) -> Iterator[tuple[file.Fingerprint, file.Fingerprint]]:
    """Yield the fingerprints of a training and of its twin."""
    with TemporaryDirectory() as scratch:
        yield tuple(  # type: ignore[misc]
            recorded(
                lambda is_changed=is_changed: train(is_changed=is_changed), Path(scratch) / str(is_changed), **options
            )
            for is_changed in (False, True)
        )


def compared(parting: Parting) -> Comparison:
    """Return what `hookd diff` says of a pair."""
    with both(parting.train, backward=str(parting.has_backward).lower()) as (a, b):
        return comparison.compare(a, b, comparison.Terms(phases=frozenset(parting.phases)))


def main() -> None:
    """Write the table."""
    rows = {}
    for parting in PARTINGS:
        found = compared(parting)
        title = titled_rows.cell(inspect.getdoc(parting.train) or "")
        rows[title] = f"| {title} | {titled_rows.cell(f'{found.sentence} {found.advice}'.strip())} |"
    titled_rows.write(
        DOCUMENT,
        "partings",
        provenance="Written by `python -m tests.faults.partings`.",
        head=HEAD,
        rows=rows,
        titles=list(rows),
    )


if __name__ == "__main__":
    main()
