"""The policies of hookd_nan: report, raise, pause or skip; also for numbers on a device."""

from __future__ import annotations

import threading

import hookd_nan.forward
import hookd_nan.scan
import pytest
import torch

import hookd
from hookd import PluginError
from tests.support.layered import INF, NAN, findings, found, net, poison, scaled_training, train
from tests.support.processes import wait_until


class TestPolicy:
    def test_raise_raises_in_the_training_code(self, hook):
        model = net()
        hook.start("nan", policy="raise")
        with pytest.raises(FloatingPointError, match=r"first NaN: layers\.2\.fc output at step 3"):
            train(model, strike=lambda: model.layers[2].fc.register_forward_hook(poison(NAN)))
        assert hook.value("nan_policy", "raise") == 1
        assert [one.kind for one in hook.incidents] == ["training_changed", "nan"]
        model.layers[2].fc._forward_hooks.clear()
        train(model)  # the rest of the failed step does not get in the way

    @pytest.mark.parametrize("place", ["loss", "gradient"])
    def test_raise_is_heard_wherever_it_is_found(self, hook, place):
        model = net()
        hook.start("nan", policy="raise")
        if place == "gradient":
            model.head.bias.register_hook(lambda g: g * NAN)
        with pytest.raises(FloatingPointError, match=place):
            train(model, loss=lambda out, _step: out.mean() * (NAN if place == "loss" else 1))

    def test_raise_of_what_was_on_a_device_comes_at_the_next_call(self, hook, monkeypatch):
        monkeypatch.setattr(hookd_nan.scan, "on_host", lambda _tensor: False)
        monkeypatch.setattr(hookd_nan.forward, "on_host", lambda _tensor: False)
        model = net()
        hook.start("nan", policy="raise")
        with pytest.raises(FloatingPointError, match=r"layers\.2\.fc output at step 3"):
            train(model, strike=lambda: model.layers[2].fc.register_forward_hook(poison(NAN)))

    @pytest.mark.parametrize("kind", ["sgd", "adam", "fused"])
    def test_skipped_step_changes_nothing_at_all(self, hook, kind):
        model = net()
        optimizer = {
            "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            "adam": lambda: torch.optim.AdamW(model.parameters(), lr=0.1),
            "fused": lambda: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
        }[kind]()
        hook.start("nan", policy="skip")
        train(model, steps=3, optimizer=optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        train(model, steps=1, optimizer=optimizer, loss=lambda out, _step: out.mean() * NAN)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        train(model, steps=1, optimizer=optimizer)
        assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert hook.value("nan_policy", "skip") == 1
        assert [found(one) for one in findings(hook)] == [("", "loss", "nan", 4)]

    def test_skip_lets_the_origin_be_found_after_a_hit_of_the_gate(self, hook):
        hook.pretend(large=True)
        model = net()
        hook.start("nan", policy="skip", every=4)
        train(model, strike=lambda: model.layers[2].fc.register_forward_hook(poison(NAN)))
        assert [found(one) for one in findings(hook)] == [
            ("layers.2", "output", "nan", 3),
            ("layers.2.fc", "output", "nan", 4),
        ]
        assert all(p.isfinite().all() for p in model.parameters())

    def test_pause_holds_the_training_until_it_is_configured_away(self, hook):
        model, done = net(), threading.Event()

        def training():
            train(model, loss=lambda out, step: out.mean() * (NAN if step == 3 else 1))
            done.set()

        hook.start("nan", policy="pause")
        thread = threading.Thread(target=training)
        thread.start()
        wait_until(lambda: [one for one in hook.incidents if one.kind == "paused"], what="the pause")
        for _ in range(2):
            wait_until(
                lambda: "paused" in [one.phase for one in hook.read().heartbeats], what="a thread that is paused"
            )
            hook.tick()
        assert not done.is_set()
        assert hook.configure("nan", policy="report") == {"policy": "report"}
        thread.join(60)
        assert done.is_set()
        assert hook.metric("plugin_changes_training") == {}

    def test_detach_lets_a_paused_training_go_on(self, hook):
        thread = threading.Thread(target=train, args=(net(),), kwargs={"loss": lambda out, _step: out.mean() * NAN})
        hook.start("nan", policy="pause")
        thread.start()
        wait_until(lambda: [one for one in hook.incidents if one.kind == "paused"], what="the pause")
        hookd.stop(0.5)
        thread.join(60)
        assert not thread.is_alive()

    def test_skip_says_once_that_it_skips_no_step_of_lbfgs(self, hook):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
        hook.start("nan", policy="skip")

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(3, 2)).mean() * NAN
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        (refused,) = [one.message for one in hook.incidents if one.kind == "refused"]
        assert refused.startswith("nan: policy=skip does nothing with LBFGS")
        assert hook.value("nan_policy", "skip") == 0

    def test_policy_must_be_one_of_four(self, hook):
        with pytest.raises(PluginError, match="policy must be one of report, raise, pause, skip"):
            hook.start("nan", policy="zero")

    def test_by_default_it_is_no_mutator(self, hook):
        hook.start("nan")
        assert hook.plugin("nan").mutates is False


class TestOnADevice:
    """Numbers on a device are judged a step later; here the host's memory stands in for the device's."""

    @pytest.fixture(autouse=True)
    def _nothing_is_on_the_host(self, monkeypatch):
        monkeypatch.setattr(hookd_nan.scan, "on_host", lambda _tensor: False)
        monkeypatch.setattr(hookd_nan.forward, "on_host", lambda _tensor: False)

    @pytest.mark.parametrize("layer", ["embed", "layers.2.fc", "layers.2", "layers", "head"])
    def test_output_is_named_with_its_own_step(self, hook, layer):
        model = net()
        hook.start("nan")
        train(model, strike=lambda: model.get_submodule(layer).register_forward_hook(poison(NAN)))
        assert found(hook.incident) == (layer, "output", "nan", 3)

    def test_weight_is_named(self, hook):
        model = net()
        hook.start("nan")
        train(model, strike=lambda: model.layers[1].fc.bias.data.fill_(INF))
        assert found(hook.incident) == ("layers.1.fc", "param", "inf", 3)

    def test_loss_and_gradient_are_named(self, hook):
        hook.start("nan")
        train(net(), loss=lambda out, step: out.mean() * (NAN if step >= 3 else 1))
        assert found(hook.incident) == ("", "loss", "nan", 3)

    def test_gradient_is_named(self, hook):
        model = net()
        hook.start("nan")
        hooked = model.layers[1].register_forward_hook
        train(model, strike=lambda: hooked(lambda _m, _i, o: o.register_hook(lambda g: g * NAN) and None))
        assert found(hook.incident) == ("layers.1", "grad", "nan", 3)

    @pytest.mark.parametrize("fused", [True, False])
    def test_skipped_steps_are_counted(self, hook, fused):
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
        hook.start("nan")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
        skipped = scaled_training(model, optimizer, scaler, steps=30)
        assert hook.incidents == []
        assert hook.value("nan_amp_skipped_steps") == skipped

    def test_healthy_training_says_nothing_and_waits_for_no_more_than_one_step(self, hook):
        model = net()
        hook.start("nan")
        train(model, steps=20)
        assert hook.incidents == []
