"""hookd_nan names where a bad gradient began; those that a GradScaler skips do not count."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.layered import INF, NAN, Wrap, found, net, poison, scaled_training, train


class TestBackward:
    @pytest.mark.parametrize("layer", ["embed", "layers.2.norm", "layers.2.fc", "layers.2.act", "layers.2", "head"])
    def test_module_whose_gradient_is_bad_first_is_named(self, hook, layer):
        model = net()

        def strike():
            model.get_submodule(layer).register_forward_hook(
                lambda _m, _i, o: o.register_hook(lambda g: g * NAN) and None
            )

        hook.start("nan")
        train(model, strike=strike)
        assert found(hook.incident) == (layer, "grad", "nan", 3)
        assert f"first NaN: {layer} gradient at step 3" in hook.incident.message

    def test_module_whose_own_backward_makes_it_is_named(self, hook):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Wrap(lambda x: (x * 0).sqrt()), nn.Linear(4, 1))
        hook.start("nan")
        train(model, steps=1)
        assert found(hook.incident) == ("2", "grad", "nan", 1)

    def test_container_is_named_before_the_module_in_it_that_it_reached_next(self, hook):
        """act(fc(norm(x))) + x: the gradient of the sum reaches the layer, then act, whose backward ends first."""
        model = net()
        hook.start("nan")
        hooked = model.layers[2].register_forward_hook
        train(model, strike=lambda: hooked(lambda _m, _i, o: o.register_hook(lambda g: g * INF) and None))
        assert found(hook.incident)[:2] == ("layers.2", "grad")

    def test_parameter_whose_gradient_alone_is_bad_is_named(self, hook):
        model = net()
        hook.start("nan")
        train(model, strike=lambda: model.layers[1].fc.bias.register_hook(lambda g: g * NAN))
        assert found(hook.incident) == ("layers.1.fc", "grad", "nan", 3)
        assert hook.incident.fields["parameter"] == "bias"

    def test_parameter_of_a_second_model_has_its_name(self, hook):
        first, second = net(), nn.Linear(4, 1)
        hook.start("nan")
        train(first, steps=1)
        second.weight.register_hook(lambda g: g * NAN)
        train(second, steps=1, at=0)
        assert found(hook.incident)[:2] == ("#Linear.(root)", "grad")

    def test_loss_has_no_module(self, hook):
        hook.start("nan")
        train(net(), loss=lambda out, step: out.mean() * (NAN if step >= 3 else 1))
        assert found(hook.incident) == ("", "loss", "nan", 3)
        assert hook.incident.message.startswith("first NaN: loss at step 3")

    def test_gradients_that_an_in_place_relu_passes_on_are_seen(self, hook):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
        hook.start("nan")
        train(model, strike=lambda: model[2].register_forward_hook(poison(INF)))
        assert found(hook.incident) == ("2", "output", "inf", 3)

    def test_optimizer_that_calls_the_model_in_its_step(self, hook):
        model = net(layers=1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        x = torch.randn(5, 4)

        def closure():
            optimizer.zero_grad()
            value = model(x).square().mean()
            value.backward()
            return value

        hook.start("nan")
        optimizer.step(closure)
        model.head.bias.register_hook(lambda g: g * NAN)
        optimizer.step(closure)
        assert found(hook.incident)[:3] == ("head", "grad", "nan")
        assert hook.value("nan_amp_skipped_steps") == 0

    def test_sparse_gradients_are_looked_at(self, hook):
        model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        hook.start("nan")
        for step in (1, 2):
            if step == 2:
                model[0].weight.register_hook(lambda g: g * NAN)
            optimizer.zero_grad()
            model(torch.tensor([1, 1, 3])).sum().backward()
            optimizer.step()
        assert found(hook.incident) == ("0", "grad", "nan", 2)

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_checkpointed_layer_is_named_once(self, hook, use_reentrant):
        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = net()

            def forward(self, x):
                x = self.inner.embed(x)
                for layer in self.inner.layers:
                    x = checkpoint(layer, x, use_reentrant=use_reentrant)
                return self.inner.head(x)

        model = Checkpointed()
        hook.start("nan", every=1)
        train(model, strike=lambda: model.inner.layers[2].fc.register_forward_hook(poison(NAN)))
        assert found(hook.incident) == ("inner.layers.2.fc", "output", "nan", 3)
        assert hook.value("nan_nonfinite", "inner.layers.2.fc", "output", "nan") == 4  # the recompute does not count

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_bad_gradient_under_checkpointing_is_no_skipped_step(self, hook, use_reentrant):
        inner = nn.Sequential(nn.Linear(4, 4), Wrap(lambda x: (x * 0).sqrt()), nn.Linear(4, 4))
        model = Wrap(lambda x: checkpoint(inner, x, use_reentrant=use_reentrant))
        model.inner, model.head = inner, nn.Linear(4, 1)
        model.form = lambda x: model.head(checkpoint(inner, x * 1, use_reentrant=use_reentrant))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        hook.start("nan")
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
        optimizer.step()
        assert hook.incident.fields["where"] == "grad"
        assert hook.value("nan_amp_skipped_steps") == 0


class TestGradScaler:
    @pytest.mark.parametrize("kind", ["sgd", "adam", "fused"])
    @pytest.mark.parametrize("accumulate", [1, 3])
    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_skipped_steps_are_counted_and_no_incident(self, hook, kind, accumulate, set_to_none):
        model = net()
        optimizer = {
            "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-3),
            "adam": lambda: torch.optim.Adam(model.parameters(), lr=1e-3),
            "fused": lambda: torch.optim.Adam(model.parameters(), lr=1e-3, fused=True),
        }[kind]()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
        hook.start("nan")
        skipped = scaled_training(model, optimizer, scaler, steps=30, accumulate=accumulate, set_to_none=set_to_none)
        assert skipped > 2
        assert hook.incidents == []
        assert hook.value("nan_amp_skipped_steps") == skipped
        assert hook.metric("nan_nonfinite") == {}

    @pytest.mark.parametrize("fused", [True, False])
    def test_gradients_that_stay_bad_at_any_scale_are_reported(self, hook, fused):
        model = nn.Sequential(nn.Linear(4, 4), Wrap(lambda x: (x * 0).sqrt()), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
        hook.start("nan", amp_patience=5)
        scaled_training(model, optimizer, torch.amp.GradScaler("cpu"), steps=4)
        assert hook.incidents == []
        scaled_training(model, optimizer, torch.amp.GradScaler("cpu"), steps=4)
        assert found(hook.incident)[:3] == ("1", "grad", "nan")

    def test_bad_output_under_a_scaler_is_reported_at_once(self, hook):
        model = net()
        model.layers[1].fc.register_forward_hook(poison(NAN))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        hook.start("nan")
        scaled_training(model, optimizer, torch.amp.GradScaler("cpu"), steps=1)
        assert found(hook.incident)[:3] == ("layers.1.fc", "output", "nan")

    def test_gradients_accumulated_without_a_scaler_are_not_taken_for_skipped(self, hook):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model.head.bias.register_hook(lambda g: g * NAN)
        hook.start("nan")
        for _ in range(3):
            model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        assert found(hook.incident)[:3] == ("head", "grad", "nan")
        assert hook.value("nan_amp_skipped_steps") == 0
