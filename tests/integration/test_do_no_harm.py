"""Odd trainings go the same way with hookd: weights, gradients, random numbers, warnings, errors, and what code of theirs runs."""

from __future__ import annotations

import pytest
from hookd_drift.replicas import replicas

from hookd.api.passive import plainly
from hookd.target.tensors.host_memory import is_readable
from tests.support import evidence
from tests.support.evidence import difference, ran, train
from tests.support.harm import KINDS, harm
from tests.support.odd import TABLE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TABLE)
def test_nothing_differs(name, kind):
    assert harm(TABLE[name], kind) == ""


def spoilt(what):
    """Train a parametrized module, and change it before the third step; return the difference in the evidence."""
    kept = {}

    def make():
        kept["model"], step = TABLE["spectral_norm"]()
        return kept["model"], step

    def at(step):
        if step == 2:
            what(kept["model"])

    return difference(train(TABLE["spectral_norm"], 4, lambda _step: None), train(make, 4, at))


@pytest.mark.parametrize(
    ("what", "seen"),
    [
        (lambda model: model.weight, "result"),  # one more power iteration
        (lambda model: model.bias.detach().add_(0), "bias"),  # the version counter alone
        (lambda model: ran("something", draws=False), "its own code ran"),
        (lambda model: model.eval(), "result"),
        (lambda model: model.register_forward_hook(lambda *_: None), "hooks"),
        (lambda model: setattr(model, "more", 1), "own names"),
    ],
)
def test_the_evidence_has_it(what, seen):
    assert seen in spoilt(what)


def test_the_evidence_of_the_same_is_the_same():
    assert spoilt(lambda model: None) == ""


@pytest.mark.filterwarnings("ignore")  # torch's own, of what is old
@pytest.mark.parametrize("name", [name for name in TABLE if "lazy" not in name])
def test_what_drift_compares_is_found_without_a_call(name):
    model, _ = TABLE[name]()
    evidence.take_notes()
    with plainly():  # as in every hook of an observer
        replicas([("(root)", model)], is_readable, is_all=True, is_gradients=False)
        replicas([("(root)", model)], is_readable, is_all=False, is_gradients=False)
    assert evidence.take_notes() == []
