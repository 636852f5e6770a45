"""The examples of docs/tutorials, held against what they should say; each is short, and passes `hookd plugin check`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hookd.check import blocking, names, packaging, signatures, source
from hookd.testing import FakeTarget, Training, assert_bit_identical
from tests.support.environment import REPOSITORY

EXAMPLES = sorted((REPOSITORY / "examples" / "plugins").glob("hookd_*.py"))
LINES = 60


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
    """Four experts, of which each token goes to two."""

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


def test_all_together_change_nothing():
    from hookd_entropy import Entropy
    from hookd_experts import Experts

    assert_bit_identical(Entropy, Experts, make=lambda: encoder()[0], every=1)
    assert_bit_identical(Experts, Entropy, make=mixture, every=1)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_has_a_page_and_nothing_to_mend(example):
    assert sum(bool(line.strip()) for line in example.read_text().splitlines()) <= LINES
    (one,) = source.subjects(str(example))
    found = [*signatures.problems(one), *blocking.problems(one), *packaging.problems(one), *names.declared(one.file)]
    assert not found
    page = (REPOSITORY / "docs" / "tutorials" / f"{one.name}.md").read_text()
    assert f"../../examples/plugins/{example.name}" in page
    assert f"hookd_{one.name}_" in page
