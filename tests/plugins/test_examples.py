"""The examples of docs/tutorials, checked for their results; each is short, and passes `hookd plugin check`."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from hookd import PluginError
from hookd.testing import FakeTarget, Training, assert_bit_identical
from hookd.tool.check import blocking, names, packaging, signatures, source
from tests.support.environment import REPOSITORY

EXAMPLES = sorted((REPOSITORY / "examples" / "plugins").glob("hookd_*.py"))
LINES = 60
"""Allowed lines of the file, with its docstrings and blank lines."""


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples" / "plugins"))


def encoder(*, batch_first=True, causal=False):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first)
    mask = nn.Transformer.generate_square_subsequent_mask(6) if causal else None
    batch = torch.randn(3, 6, 16) if batch_first else torch.randn(6, 3, 16)
    return Training(layer, lambda _step: (batch, mask)), batch, mask


class Mixture(nn.Module):
    """Four experts; each token goes to two of them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        scores, chosen = self.gate(x).softmax(-1).topk(2, -1)
        every = torch.stack([expert(x) for expert in self.experts], -2)
        return (every.gather(-2, chosen.unsqueeze(-1).expand(-1, -1, 8)) * scores.unsqueeze(-1)).sum(-2)


def mixture():
    torch.manual_seed(0)
    batch = torch.randn(32, 8)
    return Training(Mixture(), lambda _step: (batch,))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_entropy_is_that_of_the_weights_that_torch_gives(batch_first, causal):
    from hookd_entropy import Entropy

    training, batch, mask = encoder(batch_first=batch_first, causal=causal)
    _, weights = training.model.self_attn(
        batch, batch, batch, attn_mask=mask, need_weights=True, average_attn_weights=False
    )
    shares = weights.double().clamp_min(1e-300)
    expected = (-(shares * shares.log()).sum(-1) / math.log(6)).mean((0, 2)).detach()
    with FakeTarget(make=lambda: training) as target:
        target.start(Entropy, every=1)
        target.run_steps(1)
        target.assert_metrics(
            {
                f'hookd_entropy_ratio{{module="self_attn",head="{head}"}}': pytest.approx(float(value), rel=1e-4)
                for head, value in enumerate(expected)
            }
        )
        target.stop_clean()


def test_experts_are_counted_as_they_are_chosen():
    from hookd_experts import Experts

    training = mixture()
    (batch,) = training.batch(0)
    chosen = training.model.gate(batch).topk(2, -1).indices.flatten().tolist()
    expected = [chosen.count(expert) / len(chosen) for expert in range(4)]
    with FakeTarget(make=lambda: training) as target:
        target.start(Experts, every=1)
        target.run_steps(1)
        target.assert_metrics(
            {
                'hookd_experts_imbalance_ratio{module="gate"}': pytest.approx(4 * max(expected)),
                **{
                    f'hookd_experts_load_ratio{{module="gate",expert="{expert}"}}': pytest.approx(share)
                    for expert, share in enumerate(expected)
                },
            }
        )
        target.stop_clean()


class Accumulated(Training):
    """Gradients of `micro` micro-batches of 8 samples are accumulated, each divided by `over`; zeroed by the optimizer."""

    def __init__(self, model, batches, loss=None, *, micro=4, over=4):
        super().__init__(model, lambda step: (batches(step),), loss)
        self.micro, self.over = micro, over

    def step(self):
        for at in range(self.micro):
            (self.loss(self.model(*self.batch(self.steps * self.micro + at))) / self.over).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return 0.0


def expected_noise(training, keep, steps):
    """The formulas of appendix A.1, from the gradients of the micro-batches themselves, in float64."""
    model = copy.deepcopy(training.model).double()
    square = trace = 0.0
    small, big = 8, 8 * training.micro
    for step in range(steps):
        model.load_state_dict(training.weights[step])
        grads = []
        for at in range(training.micro):
            (batch,) = training.batch(step * training.micro + at)
            found = torch.autograd.grad(training.loss(model(batch.double())), tuple(model.parameters()))
            grads.append(torch.cat([one.flatten() for one in found]))
        whole, first = torch.stack(grads).mean(0).square().sum(), grads[0].square().sum()
        if step:  # the first step is one that hookd has not seen from its beginning
            square = keep * square + (1 - keep) * float((big * whole - small * first) / (big - small))
            trace = keep * trace + (1 - keep) * float((first - whole) / (1 / small - 1 / big))
    return trace / square


@pytest.mark.parametrize("over", [1, 4])
def test_noise_is_that_of_the_formulas_whether_losses_are_divided_or_not(over):
    from hookd_noise import Noise

    class Kept(Accumulated):
        def __init__(self):
            torch.manual_seed(0)
            data = torch.randn(24, 8, 8) + 1.0
            model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
            super().__init__(model, lambda step: data[step], over=over)
            self.weights = []

        def step(self):
            self.weights.append(copy.deepcopy(self.model.state_dict()))
            return super().step()

    training = Kept()
    with FakeTarget(make=lambda: training, record=False) as target:
        target.start(Noise, every=1, batch=8, keep=0.5)
        target.run_steps(6)
        expected = expected_noise(training, 0.5, 6)
        target.assert_metrics({"hookd_noise_scale_samples": pytest.approx(expected, rel=1e-4)})
        target.stop_clean()


def test_noise_finds_the_scale_of_a_gradient_whose_distribution_is_known():
    from hookd_noise import Noise

    torch.manual_seed(0)
    mean = torch.full((64,), 0.25)  # of the gradient: |G|^2 = 4, and the trace of its covariance is 64
    training = Accumulated(nn.Linear(64, 1, bias=False), lambda _: mean + torch.randn(8, 64), torch.mean)
    with FakeTarget(make=lambda: training, record=False) as target:
        target.start(Noise, every=1, batch=8, keep=0.998)
        target.run_steps(800)
        target.assert_metrics({"hookd_noise_scale_samples": pytest.approx(64 / 4, rel=0.1)})
        target.stop_clean()


def test_noise_says_nothing_where_nothing_is_accumulated_and_refuses_several_ranks(monkeypatch):
    from hookd_noise import Noise

    with FakeTarget(record=False) as target:
        target.start(Noise, every=1)
        target.run_steps(4)
        target.assert_metrics({"hookd_noise_scale_samples": 0.0})
        target.stop_clean()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with FakeTarget(record=False) as target, pytest.raises(PluginError, match="jobs of one rank"):
        target.start(Noise)


def test_all_together_change_nothing():
    from hookd_entropy import Entropy
    from hookd_experts import Experts
    from hookd_noise import Noise

    assert_bit_identical(Entropy, Experts, Noise, make=lambda: encoder()[0], every=1)
    assert_bit_identical(Experts, Entropy, Noise, make=mixture, every=1)
    assert_bit_identical(Noise, make=lambda: Accumulated(nn.Linear(8, 4), lambda _: torch.ones(8, 8)), every=1)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_has_a_page(example):
    assert len(example.read_text().splitlines()) < LINES
    name = example.stem.removeprefix("hookd_")
    page = (REPOSITORY / "docs" / "tutorials" / f"{name}.md").read_text()
    assert f"../../examples/plugins/{example.name}" in page
    assert f"hookd_{name}_" in page


def test_there_is_nothing_to_mend_in_them():
    checked = source.subjects(str(REPOSITORY / "examples" / "plugins"))
    sides = {one.name: one.side for one in checked}
    in_targets, in_daemon = ("entropy", "experts", "noise"), ("slack", "tensorboard")
    assert sides == dict.fromkeys(in_targets, "target") | dict.fromkeys(in_daemon, "daemon")
    for one in checked:
        found = [*signatures.problems(one), *packaging.problems(one), *names.declared(one.file, one.side)]
        found += blocking.problems(one) if one.side == "target" else ()
        assert not found
