"""The incidents of hookd_nan in a step in which it has not looked at the modules, and how certain they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookd import PluginError
from tests.support.layered import INF, NAN, findings, found, net, poison, scaled_training, train


class TestWhatIsSaid:
    def test_step_that_was_not_looked_at_is_looked_at_as_far_as_outputs_are_there(self, hook):
        model = net()
        hook.start("nan", every=4)
        train(model, steps=8, strike=lambda: model.head.register_forward_hook(lambda _m, _i, o: o * INF))
        assert found(hook.incident) == ("head", "output", "inf", 3)
        assert (hook.incident.fields["is_exact"], hook.incident.fields["since_step"]) == (True, 3)
        assert hook.incident.fields["stack"] == ["(root)", "head"]
        assert (hook.incident.fields["inf_count"], hook.incident.fields["shape"]) == (5, [5, 1])
        before = [call["module"] for call in hook.incident.fields["calls_before"]]
        assert before[-2:] == ["layers.3", "layers"]

    def test_small_outputs_are_there_to_be_traced_back_also_where_nothing_else_needs_them(self, hook):
        model = net()
        hook.start("nan", every=4)
        train(model, steps=8, strike=lambda: model.layers[2].fc.register_forward_hook(poison(NAN)))
        assert found(hook.incident) == ("layers.2.fc", "output", "nan", 3)
        assert hook.incident.fields["is_exact"] is True

    def test_what_never_leaves_the_model_is_found_in_a_step_that_is_not_sampled(self, hook):
        class Healing(nn.Module):
            def forward(self, x):
                return x.nan_to_num()

        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Healing()), nn.Linear(4, 1))
        hook.start("nan", every=50)
        train(model, steps=8, strike=lambda: model[1][0].register_forward_hook(poison(NAN)))
        assert found(hook.incident) == ("1.0", "output", "nan", 3)
        assert (hook.incident.fields["is_exact"], hook.incident.fields["since_step"]) == (True, 3)
        assert hook.incident.fields["stack"] == ["(root)", "1", "1.0"]

    def test_what_is_too_large_to_be_looked_at_as_it_returns_is_traced_back_from_what_is_not(self, hook):
        model = nn.Sequential(
            nn.Linear(4, 16384), nn.Tanh(), nn.Sequential(nn.Linear(16384, 1), nn.Tanh()), nn.Linear(1, 1)
        )
        hook.start("nan", every=50)
        train(model, steps=8, strike=lambda: model[1].register_forward_hook(poison(NAN)))
        assert found(hook.incident) == ("1", "output", "nan", 3)
        assert (hook.incident.fields["is_exact"], hook.incident.fields["since_step"]) == (True, 3)
        assert "or_in" not in hook.incident.fields

    def test_what_is_too_large_for_once_is_traced_back_too(self, hook):
        model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        hook.start("nan", every=1)
        for size in [5, 5, 1200, 5]:
            if size > 5:
                model[1].register_forward_hook(poison(NAN))
            model(torch.randn(size, 4)).mean().backward()
            optimizer.step()
        assert found(hook.incident) == ("1", "output", "nan", 3)
        assert hook.incident.fields["is_exact"] is True

    def test_where_outputs_are_gone_it_says_in_which_modules_it_may_have_been_born(self, hook):
        hook.pretend(large=True)
        model = net()
        hook.start("nan", every=4)
        train(model, steps=8, strike=lambda: model.layers[2].fc.register_forward_hook(poison(NAN)))
        incident = hook.incident
        assert found(incident) == ("layers.2", "output", "nan", 3)
        assert incident.fields["or_in"] == ["layers.2.fc", "layers.2.act"]  # nothing needs these two for the backward
        assert incident.fields["is_exact"] is False
        assert "born there, or in layers.2.fc, layers.2.act, whose outputs are gone" in incident.message

    def test_the_model_is_not_blamed_for_what_was_traced_back_inside_of_it(self, hook):
        """From the trace on, every module is looked at: nothing is known of those that had returned before it."""

        class Drops(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.fc = nn.Linear(4, 1 << 18), nn.Linear(4, 4)

            def forward(self, x):
                return self.fc(self.inner(x)[:, :4].clone())

        model = nn.Sequential(nn.Linear(4, 4), Drops(), nn.Linear(4, 4))
        hook.start("nan", every=1000)
        train(model, strike=lambda: model[1].inner.register_forward_hook(poison(NAN)))
        assert {one.module: one.fields["or_in"] for one in findings(hook)} == {"1": ["1.inner"]}
        assert hook.metric("hookd_nan_origin") == {("1", "output", "nan"): 0.5, ("1.inner", "output", "nan"): 0.5}

    def test_code_between_modules_is_named_as_the_module_that_it_is_in(self, hook):
        class Attends(nn.Module):
            def __init__(self):
                super().__init__()
                self.query, self.value, self.project, self.mask = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), 0.0

            def forward(self, x):
                weights = (self.query(x) @ x.t() + self.mask).softmax(-1)
                return self.project(weights @ self.value(x))

        model = nn.Sequential(nn.Linear(4, 4), Attends(), nn.Linear(4, 4))
        hook.start("nan", every=4)
        train(model, strike=lambda: setattr(model[1], "mask", -INF))  # nothing may be looked at: the softmax is 0 / 0
        incident = hook.incident
        assert found(incident) == ("1", "output", "nan", 3)
        assert incident.fields["stack"] == ["(root)", "1"]
        assert "1.project" not in incident.fields.get("or_in", [])

    def test_code_of_a_model_between_its_modules_is_named_as_the_model(self, hook):
        class Divides(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second, self.by = nn.Linear(4, 4), nn.Sigmoid(), 1.0

            def forward(self, x):
                return self.second(self.first(x)) / self.by

        model = Divides()
        hook.start("nan", every=4)
        train(model, strike=lambda: setattr(model, "by", 0.0))
        assert found(hook.incident) == ("(root)", "output", "inf", 3)

    def test_first_step_after_an_attach_may_be_older(self, hook):
        model = net()
        model.head.weight.data.fill_(NAN)
        hook.start("nan")
        train(model, steps=2)
        assert hook.incident.fields["is_exact"] is False
        assert "it may be older" in hook.incident.message
        assert "(counted from the attach)" in hook.incident.message

    def test_patience_must_be_positive(self, hook):
        with pytest.raises(PluginError, match="amp_patience"):
            hook.start("nan", amp_patience=0)

    def test_training_is_bit_identical(self, hook):
        def weights():
            torch.manual_seed(1)
            model = net()
            train(model, optimizer=torch.optim.AdamW(model.parameters()))
            return torch.cat([p.detach().view(-1) for p in model.parameters()])

        plain = weights()
        hook.start("nan", every=1)
        assert torch.equal(weights(), plain)


class TestGate:
    """Findings in a step in which the modules are not looked at: here all but steps 1, 5, 9."""

    @pytest.mark.parametrize(("layer", "owner"), [("embed", "embed"), ("layers.2.fc", "layers.2.fc")])
    def test_bad_weight_is_named_with_the_step_whose_optimizer_may_have_made_it(self, hook, layer, owner):
        model = net()
        hook.start("nan", every=4)
        train(model, strike=lambda: model.get_submodule(layer).weight.data.view(-1)[:1].fill_(NAN))
        assert found(hook.incident) == (owner, "param", "nan", 3)
        assert (hook.incident.fields["is_exact"], hook.incident.fields["since_step"]) == (False, 2)

    def test_bad_batch_is_the_models_input(self, hook):
        model = net()
        hook.start("nan", every=4)
        train(model, steps=2)
        model(torch.full((5, 4), INF))
        assert found(hook.incident) == ("(root)", "input", "inf", 3)

    def test_loss_is_named_exactly(self, hook):
        hook.start("nan", every=4)
        train(net(), loss=lambda out, step: out.mean() * (NAN if step >= 3 else 1))
        assert found(hook.incident) == ("", "loss", "nan", 3)
        assert hook.incident.fields["is_exact"] is True

    def test_parameter_whose_bad_gradient_came_first_is_named(self, hook):
        model = net()
        hook.start("nan", every=4)
        hooked = model.layers[2].register_forward_hook
        train(model, strike=lambda: hooked(lambda _m, _i, o: o.register_hook(lambda g: g * NAN) and None))
        assert found(hook.incident) == ("layers.2.fc", "grad", "nan", 3)
        assert hook.incident.fields["is_exact"] is False

    def test_module_is_named_when_it_makes_another_one_and_the_first_was_thrown_away(self, hook):
        hook.pretend(large=True)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        hook.start("nan", every=4)
        for step in range(1, 8):
            if step == 3:
                model.layers[2].fc.register_forward_hook(poison(NAN))
            value = model(torch.randn(5, 4)).mean()
            if value.isfinite():  # a training loop that checks its own losses
                optimizer.zero_grad()
                value.backward()
            optimizer.step()
        first, second = hook.incidents
        assert found(first) == ("layers.2", "output", "nan", 3)
        assert (first.fields["is_exact"], first.fields["since_step"]) == (False, 3)
        assert found(second) == ("layers.2.fc", "output", "nan", 4)
        assert (second.fields["is_exact"], second.fields["since_step"]) == (False, 2)
        assert second.fields["first_seen"] == {"step": 3, "module": "layers.2", "where": "output"}
        assert hook.metric("nan_origin") == {("layers.2.fc", "output", "nan"): 1}
        assert hook.value("nan_first_step") == 3

    def test_parameters_that_are_bad_for_it_are_not_taken_for_the_origin(self, hook):
        hook.pretend(large=True)
        model = net()
        hook.start("nan", every=4)
        train(model, steps=8, strike=lambda: model.layers[2].fc.register_forward_hook(poison(NAN)))
        assert found(hook.incident) == ("layers.2", "output", "nan", 3)
        assert any("cannot be found any more" in line for line in hook.logs)
        assert hook.value("nan_nonfinite", "embed", "param", "nan") == 1  # step 4, in which everything is looked at
        assert hook.value("nan_nonfinite", "embed", "output", "nan") == 1  # step 5; then the interval is let go

    def test_root_without_modules_is_its_own_origin(self, hook):
        class Log(nn.Module):
            def forward(self, x):
                return x.log()

        model, log = net(), Log()
        hook.start("nan", every=4)
        train(
            model,
            steps=6,
            loss=lambda out, step: log(out * 0 + (1 if step < 3 else -1)).mean(),
        )
        assert found(hook.incident)[:2] == ("#Log.(root)", "output")

    def test_gradients_whose_norm_overflows_are_no_finding(self, hook):
        model = net()
        hook.start("nan", every=4)
        train(
            model,
            steps=4,
            loss=lambda out, _step: out.sum() * 1e30,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        )
        assert hook.incidents == []

    def test_incident_has_the_stack_of_the_training_code(self, hook):
        hook.start("nan", every=4)
        train(net(), loss=lambda out, step: out.mean() * (NAN if step >= 3 else 1))
        *_, last = hook.incident.fields["python_stack"]
        assert "layered.py" in last
        assert last.endswith(" train")


class TestGradientsOfOneStepInTen:
    """The remaining checks if the budget is far too small: all others are as rare as they may be, and no gradient is small."""

    @pytest.fixture(autouse=True)
    def none_is_small(self, monkeypatch):
        monkeypatch.setattr("hookd_nan.gradients.SMALL", -1)

    def seldom(self, hook):
        hook.start("nan")
        hook.sample_every("nan", 10_000)

    def test_the_parameters_that_a_bad_gradient_has_made_bad_are_found_in_the_next_step(self, hook):
        model = net()
        self.seldom(hook)
        hooked = model.layers[2].register_forward_hook
        train(model, steps=8, strike=lambda: hooked(lambda _m, _i, o: o.register_hook(lambda g: g * NAN) and None))
        assert found(hook.incident) == ("embed", "param", "nan", 4)
        assert (hook.incident.fields["since_step"], hook.incident.fields["gradients"]) == (None, "unknown")
        assert (hook.incident.fields["since_if_used"], hook.incident.fields["last_bad"]) == (3, "layers.2.fc.bias"), (
            "when and where it went bad"
        )
        said = (
            "; it may be older than that; not all gradients were checked:"
            " if the parameter is used in every step, it went bad in step 3; "
        )
        assert f"{said}14 parameters are bad, the last in the model is layers.2.fc.bias" in hook.incident.message
        steps = hook.incident.fields["steps_before"]
        assert [("loss" in one, "largest_gradient" in one) for one in steps] == [
            (True, True),
            *[(True, False)] * (len(steps) - 1),
        ]

    def test_a_bad_gradient_that_reaches_small_ones_is_found_before_it_is_used(self, hook, monkeypatch):
        monkeypatch.setattr("hookd_nan.gradients.SMALL", 8)  # the biases and normalizations
        model = net()
        self.seldom(hook)
        hooked = model.layers[2].fc.register_forward_hook
        train(model, steps=8, strike=lambda: hooked(lambda _m, _i, o: o.register_hook(lambda g: g * NAN) and None))
        assert found(hook.incident) == ("layers.2.fc", "grad", "nan", 3)
        assert hook.incident.fields["or_in"] == ["layers.2.act", "layers.3.norm"]
        assert "born in its backward, or in that of layers.2.act, layers.3.norm, or in code" in hook.incident.message
        assert hook.metric("nan_origin")["layers.2.fc", "grad", "nan"] == pytest.approx(1 / 3)

    def test_under_a_scaler_each_step_is_looked_at(self, hook):
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=2.0)
        self.seldom(hook)
        model.layers[1].register_forward_hook(lambda _m, _i, o: o.register_hook(lambda g: g * INF) and None)
        skipped = scaled_training(model, torch.optim.SGD(model.parameters(), lr=0.01), scaler, steps=8)
        assert skipped == 8
        assert hook.value("nan_amp_skipped_steps") == 7, "of the last one it is known at the next loss"

    @pytest.mark.parametrize("where", ["0.weight", "0.bias", "1.bias"])
    def test_minus_infinity_in_what_is_trained_is_what_a_gradient_has_made_of_it(self, hook, where):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.seldom(hook)
        struck = model.get_parameter(where)
        train(model, steps=8, strike=lambda: struck.register_hook(lambda grad: torch.full_like(grad, INF)))
        module, _, own = where.partition(".")
        assert found(hook.incident) == (module, "param", "inf", 4)
        assert (hook.incident.fields["parameter"], hook.incident.fields["since_if_used"]) == (own, 3)

    def test_of_a_parameter_that_is_not_used_in_each_step_no_step_is_named(self, hook):
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        class Seldom(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, x):
                return self.model[0](x) + (self.model[1](x) if self.step in (1, 4, 24) else 0)

        net = Seldom()
        self.seldom(hook)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for net.step in range(1, 25):
            if net.step == 4:
                handle = model[1].weight.register_hook(lambda grad: grad * NAN)
            net(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if net.step == 4:
                handle.remove()
        assert found(hook.incident) == ("model.1", "param", "nan", 24)
        assert hook.incident.fields["since_step"] is None

    def test_gradients_of_a_closure_are_looked_at_in_each_step(self, hook):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        self.seldom(hook)

        def closure():
            optimizer.zero_grad()
            value = model(torch.ones(2, 4)).square().mean()
            value.backward()
            return value

        for step in range(1, 6):
            if step == 4:
                model.weight.register_hook(lambda grad: grad * NAN)
            optimizer.step(closure)
        assert found(hook.incident) == ("(root)", "grad", "nan", 4)
