"""hookd_gradclip reports faulty options, and changes them while the training goes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookd import PluginError


@pytest.mark.parametrize(
    ("options", "words", "hint"),
    [
        ({"mode": "agc", "clip_factor": 0.1, "eps": "inf"}, "eps must be positive and finite", None),
        ({"max_norm": 1.0, "every": 3}, "every step", None),
        ({"every": 3}, "every step", None),
        ({"mode": "agc"}, "needs a positive and finite clip_factor", "clip_factor=0.01"),
        ({"mode": "value"}, "needs a positive and finite clip_value", "clip_value=1.0"),
        ({"mode": "param"}, "needs a positive and finite max_norm", "max_norm=1.0"),
        ({"clip_value": 1.0}, "needs a positive and finite max_norm", "mode=value"),
        ({"clip_factor": 0.01}, "needs a positive and finite max_norm", "mode=agc"),
    ],
)
def test_wrong_options_are_refused_with_what_to_do(hook, options, words, hint):
    with pytest.raises(PluginError, match=words) as refused:
        hook.start("gradclip", **options)
    if hint:
        assert refused.value.hint == hint


def train(steps):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_norm": 1.0, "exclude": "0.*|2.*"}, "exclude=2.* matches no parameter; there is"),
        ({"max_norm": 1.0, "exclude": "1.wight"}, "exclude=1.wight matches no parameter; there is 1.weight"),
        ({"mode": "module", "max_norm": 1.0, "modules": "0|fc"}, "modules=fc matches no module; there is"),
        ({"max_norm": 1.0, "exclude": "0.*|*.bias"}, None),
        ({"mode": "module", "max_norm": 1.0, "modules": "0|1"}, None),
        ({}, None),
    ],
)
def test_a_pattern_that_matches_nothing_is_reported_once(hook, options, words):
    hook.start("gradclip", **options)
    train(45)
    messages = [one.message for one in hook.incidents if one.kind == "option"]
    assert [words in text for text in messages] == ([True] if words else [])


class TestLive:
    @pytest.fixture
    def configure(self, hook):
        """Return a function that changes options, takes the step of the change, and returns gradient, options and incidents."""
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)

        def step():
            weight.grad = torch.tensor([30.0, 40.0])
            optimizer.step()
            return weight.grad.tolist()

        def configure(**options):
            grads = []
            now = hook.configure("gradclip", lambda: grads.append(step()), **options)
            (grad,) = grads
            return grad, now, hook.incidents[-1].message

        hook.start("gradclip", max_norm=5)
        return configure

    def test_another_mode_goes_without_the_options_that_it_does_not_know(self, configure):
        grad, options, reported = configure(mode="value", clip_value=2)
        assert grad == [2.0, 2.0]
        assert options == {"mode": "value", "clip_value": "2"}
        assert "mode=value, clip_value=2 (no longer with max_norm)" in reported

    def test_an_empty_value_takes_an_option_back(self, configure):
        configure(norm_type="inf")
        grad, options, reported = configure(norm_type="")
        assert grad == pytest.approx([3.0, 4.0], rel=1e-5)
        assert options == {"max_norm": "5"}
        assert "(no longer with norm_type)" in reported

    def test_what_is_given_for_another_mode_is_refused(self, configure):
        with pytest.raises(PluginError, match="mode=value has no norm_type"):
            configure(mode="value", clip_value=2, norm_type=1)
        assert configure(max_norm=10)[0] == pytest.approx([6.0, 8.0], rel=1e-5)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"mode": "norm"}, "needs a positive and finite max_norm"),
            ({"mode": "value", "max_norm": 1.0}, "needs a positive and finite clip_value"),
            ({"max_norm": -1.0}, "needs a positive and finite max_norm, not -1"),
            ({"max_norm": "nan"}, "needs a positive and finite max_norm, not nan"),
            ({"max_norm": "inf"}, "needs a positive and finite max_norm, not inf"),
            ({"max_norm": "much"}, "must be a number"),
            ({"mode": "global", "max_norm": 1.0}, "one of norm, value, param, agc, module"),
            ({"max_norm": 1.0, "order": "random"}, "one of model, optimizer"),
            ({"maxnorm": 1.0}, "no such option"),
            ({"max_norm": 1.0, "norm_type": 0}, "norm_type"),
            ({"mode": "agc"}, "needs a positive and finite clip_factor"),
            ({"mode": "agc", "clip_factor": 0.1, "eps": 0}, "eps must be positive"),
            ({"mode": "agc", "clip_factor": 0.1, "max_norm": 1.0}, "mode=agc has no max_norm"),
            ({"max_norm": 1.0, "modules": "fc"}, "mode=norm has no modules"),
            ({"max_norm": 1.0, "nonfinite": "zero"}, "one of leave, skip"),
        ],
    )
    def test_wrong_options_are_refused_with_a_reason(self, hook, options, words):
        with pytest.raises(PluginError, match=words):
            hook.start("gradclip", **options)

    def test_dry_run_of_several_ranks_is_allowed(self, hook, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
        hook.start("gradclip", max_norm=1.0, dry_run=True)
