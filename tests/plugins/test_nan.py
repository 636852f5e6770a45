"""hookd_nan names the place where the first NaN or infinity was born, and raises no false alarm."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
from torch import nn

from tests.support.layered import INF, NAN, found, net, poison, train


class TestForward:
    @pytest.mark.parametrize(
        "layer", ["embed", "layers.2.norm", "layers.2.fc", "layers.2.act", "layers.2", "layers", "head"]
    )
    @pytest.mark.parametrize(("value", "kind"), [(NAN, "nan"), (INF, "inf")])
    def test_module_whose_output_is_bad_first_is_named(self, hook, layer, value, kind):
        model = net()
        hook.start("nan")
        train(model, strike=lambda: model.get_submodule(layer).register_forward_hook(poison(value)))
        assert found(hook.incident) == (layer, "output", kind, 3)
        assert hook.metric("nan_origin") == {(layer, "output", kind): 1}
        assert hook.value("nan_first_step") == 3

    def test_counts_shape_and_stack_are_in_the_incident(self, hook):
        model = net()
        hook.start("nan")
        train(model, strike=lambda: model.layers[2].fc.register_forward_hook(poison(NAN)))
        incident = hook.incident
        assert incident.message.startswith("first NaN: layers.2.fc output at step 3")
        assert incident.fields["stack"] == ["(root)", "layers", "layers.2", "layers.2.fc"]
        assert (incident.fields["nan_count"], incident.fields["inf_count"], incident.fields["elements"]) == (1, 0, 40)
        assert (incident.fields["shape"], incident.fields["dtype"], incident.fields["is_exact"]) == (
            [5, 8],
            "float32",
            True,
        )

    def test_consequences_are_counted_and_not_reported(self, hook):
        model = net()
        hook.start("nan", every=1)
        train(model, strike=lambda: model.layers[2].fc.register_forward_hook(poison(NAN)))
        assert len(hook.incidents) == 1
        assert hook.value("nan_nonfinite", "layers.2.fc", "output", "nan") == 4
        assert hook.value("nan_nonfinite", "(root)", "output", "nan") == 4
        assert hook.value("nan_nonfinite", "", "loss", "nan") == 4

    def test_once_the_origin_is_known_one_step_in_fifty_is_checked(self, hook):
        model = net()
        hook.start("nan")
        train(model, steps=99, strike=lambda: model.layers[2].fc.register_forward_hook(poison(NAN)))
        assert hook.value("nan_nonfinite", "layers.2.fc", "output", "nan") == 2, "in step 3, and in one of fifty"
        assert hook.value("nan_nonfinite", "", "loss", "nan") == 97
        assert len(hook.incidents) == 1

    @pytest.mark.parametrize(
        ("layer", "owner"), [("embed", "embed"), ("layers.2", "layers.2.norm"), ("layers.1.fc", "layers.1.fc")]
    )
    def test_bad_weight_is_named_with_its_owner(self, hook, layer, owner):
        model = net()

        def strike():
            next(model.get_submodule(layer).parameters()).data.view(-1)[3] = NAN

        hook.start("nan")
        train(model, strike=strike)
        assert found(hook.incident) == (owner, "param", "nan", 3)
        assert hook.incident.fields["parameter"] == "weight"
        assert f"{owner} parameter weight at step 3" in hook.incident.message

    def test_bad_batch_is_the_models_input(self, hook):
        model = net()
        hook.start("nan")
        model(torch.full((5, 4), NAN))
        assert found(hook.incident)[:3] == ("(root)", "input", "nan")

    def test_bad_input_in_keyword_arguments_is_found(self, hook):
        class Masked(nn.Module):
            def forward(self, *, x, scale):
                return x * scale

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Masked()

            def forward(self, x):
                return self.inner(x=x, scale=x.new_tensor(0.0) / 0)

        hook.start("nan")
        Outer()(torch.ones(2))
        assert found(hook.incident)[:3] == ("(root)", "output", "nan")

    def test_code_of_a_container_between_two_modules_is_named_as_the_container(self, hook):
        class Between(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x):
                return self.b(torch.log(-self.a(x).abs()))

        hook.start("nan")
        nn.Sequential(nn.Linear(4, 4), Between())(torch.randn(3, 4))
        assert found(hook.incident)[:3] == ("1", "output", "nan")

    def test_nan_that_is_taken_away_again_is_named_at_the_call_that_was_given_it(self, hook):
        class Healing(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Identity()

            def forward(self, x):
                return self.inner(x * NAN).nan_to_num()

        hook.start("nan")
        nn.Sequential(Healing())(torch.ones(3))
        assert found(hook.incident)[:3] == ("0.inner", "input", "nan")

    def test_forward_that_raises_leaves_nothing_behind(self, hook):
        class Raising(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Identity()
                self.bad = True

            def forward(self, x):
                if self.bad:
                    self.inner(x * NAN)
                    raise ValueError("planned")
                return x

        model = Raising()
        hook.start("nan")
        with pytest.raises(ValueError, match="planned"):
            model(torch.ones(3))
        model.bad = False
        model(torch.ones(3))
        assert hook.incidents == []
        assert hook.value("nan_nonfinite", "inner", "output", "nan") == 1

    def test_loss_module_that_divides_by_zero_is_a_root_of_its_own(self, hook):
        class Loss(nn.Module):
            def forward(self, out, weight):
                return (out * weight).sum() / weight.sum()

        model, loss = net(), Loss()
        hook.start("nan")
        loss(model(torch.randn(5, 4)), torch.zeros(5, 1))
        assert found(hook.incident)[:3] == ("#Loss.(root)", "output", "nan")

    def test_minus_infinity_alone_is_a_mask(self, hook):
        class Mask(nn.Module):
            def forward(self, x):
                return x.masked_fill(torch.eye(5, 4, dtype=torch.bool), -INF)

        model = nn.Sequential(nn.Linear(4, 4), Mask(), nn.Softmax(-1))
        hook.start("nan")
        train(model, steps=2)
        assert hook.incidents == []

    def test_minus_infinity_is_found_on_demand(self, hook):
        hook.start("nan", neginf=True)
        nn.Sequential(nn.Identity(), nn.Threshold(0.0, -INF))(torch.tensor([1.0, -1.0]))
        assert found(hook.incident)[:3] == ("1", "output", "inf")

    def test_rows_of_nothing_but_mask_make_the_softmax_the_origin(self, hook):
        hook.start("nan")
        nn.Sequential(nn.Softmax(-1))(torch.full((2, 4), -INF))
        assert found(hook.incident)[:3] == ("0", "output", "nan")

    def test_sum_that_would_overflow_is_no_finding(self, hook):
        hook.start("nan")
        nn.Sequential(nn.Identity())(torch.full((100,), 3e38))
        nn.Sequential(nn.Identity())(torch.full((100,), 65504.0, dtype=torch.float16))
        assert hook.incidents == []


class TestInPlace:
    def test_module_that_changed_its_inputs_is_named_and_they_are_called_unknown(self, hook):
        class Spoiler(nn.Module):
            def forward(self, x):
                x.view(-1)[0] = NAN
                return x.sum()

        hook.start("nan")
        nn.Sequential(nn.Identity(), Spoiler())(torch.ones(4))
        assert found(hook.incident)[:3] == ("1", "output", "nan")
        assert hook.incident.fields["inputs"] == "unknown"
        assert "changed its inputs in place" in hook.incident.message

    def test_module_that_was_given_a_bad_input_and_did_not_change_it_is_not_named(self, hook):
        class Between(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Identity()

            def forward(self, x):
                return self.inner(x / 0)

        hook.start("nan")
        nn.Sequential(Between())(torch.ones(4))
        assert found(hook.incident)[:3] == ("0", "output", "inf")


class TestRecorder:
    def test_calls_before_the_first_one_have_their_numbers(self, hook):
        model = net(layers=2)
        hook.start("nan", recorder=3)
        train(model, strike=lambda: model.layers[1].fc.register_forward_hook(poison(NAN)))
        calls = hook.incident.fields["calls_before"]
        assert [call["module"] for call in calls] == ["layers.0.act", "layers.0", "layers.1.norm"]
        assert all(call["min"] <= call["max"] and call["norm"] > 0 for call in calls[1:])

    def test_steps_before_show_what_changed(self, hook):
        hook.start("nan")
        model = net()
        train(model, at=4, strike=lambda: model.head.register_forward_hook(poison(NAN)))
        steps = hook.incident.fields["steps_before"]
        assert [one["step"] for one in steps] == [1, 2, 3]
        assert all(one["loss"] > 0 and one["largest_gradient"] > 0 and one["lr"] == 0.01 for one in steps)

    def test_nothing_is_kept_alive(self, hook):
        model, kept = net(), []
        model.layers[0].register_forward_hook(lambda _m, _i, o: kept.append(weakref.ref(o)))
        hook.start("nan")
        with torch.no_grad():
            model(torch.randn(5, 4))
        assert [ref() for ref in kept] == [None]


def test_warnings_of_torch_are_not_provoked(hook):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = net()
        hook.start("nan")
        train(model, steps=2)
