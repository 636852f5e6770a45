"""hookd_nan names the place where the first NaN or infinity was born, and raises no false alarm."""

from __future__ import annotations

import dataclasses
import math
import threading
import warnings
import weakref

import hookd_nan.forward
import hookd_nan.scan
import pytest
import torch
from hookd_nan.judge import Event, Judge
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hookd
from hookd import PluginError
from tests.support.processes import wait_until

NAN, INF = math.nan, math.inf


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.fc, self.act = nn.LayerNorm(d), nn.Linear(d, d), nn.ReLU()

    def forward(self, x):
        return x + self.act(self.fc(self.norm(x)))


def net(d=8, layers=4):
    model = nn.Sequential()
    model.add_module("embed", nn.Linear(4, d))
    model.add_module("layers", nn.Sequential(*(Layer(d) for _ in range(layers))))
    model.add_module("head", nn.Linear(d, 1))
    return model


def poison(value):
    def hook(_module, _inputs, output):
        output = output.clone()
        output.view(-1)[0] = value
        return output

    return hook


def train(model, *, steps=6, at=3, strike=None, optimizer=None, loss=None):
    """Train, and do `strike` before step `at`."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, steps + 1):
        if step == at and strike is not None:
            strike()
        out = model(torch.randn(5, 4))
        value = loss(out, step) if loss is not None else functional.mse_loss(out, torch.zeros_like(out))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()


def found(incident):
    return incident["module"], incident["where"], incident["kind"], incident["step"]


def findings(hook):
    """Give the incidents but for the one that tells of a policy that changes the training."""
    return [one for one in hook.incidents if one["kind"] != "training_changed"]


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
        assert incident["message"].startswith("first NaN: layers.2.fc output at step 3")
        assert incident["stack"] == ["(root)", "layers", "layers.2", "layers.2.fc"]
        assert (incident["nan_count"], incident["inf_count"], incident["elements"]) == (1, 0, 40)
        assert (incident["shape"], incident["dtype"], incident["is_exact"]) == ([5, 8], "float32", True)

    def test_consequences_are_counted_and_not_reported(self, hook):
        model = net()
        hook.start("nan")
        train(model, strike=lambda: model.layers[2].fc.register_forward_hook(poison(NAN)))
        assert len(hook.incidents) == 1
        assert hook.value("nan_nonfinite", "layers.2.fc", "output", "nan") == 4
        assert hook.value("nan_nonfinite", "(root)", "output", "nan") == 4
        assert hook.value("nan_nonfinite", "", "loss", "nan") == 4

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
        assert hook.incident["parameter"] == "weight"
        assert f"{owner} parameter weight at step 3" in hook.incident["message"]

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
        assert found(hook.incident)[:3] == ("#2.(root)", "output", "nan")

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


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: object = None


class Wrap(nn.Module):
    """Gives its input back in some other form."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x):
        return self.form(x)


class Source(nn.Module):
    """Makes a value out of nothing."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, _x):
        return self.make()


def coo(*values):
    return torch.sparse_coo_tensor(
        torch.tensor([list(range(len(values)))]), torch.tensor(values), (9,), check_invariants=True
    )


BAD = {
    "dict": lambda: {"ids": torch.arange(3), "logits": torch.tensor([1.0, NAN])},
    "tuple": lambda: (torch.ones(2), (torch.ones(1), torch.tensor([NAN]))),
    "list": lambda: [torch.ones(2), None, torch.tensor([NAN])],
    "dataclass": lambda: Output(torch.ones(2), {"deep": [torch.tensor([NAN])]}),
    "float64": lambda: torch.tensor([1.0, NAN], dtype=torch.float64),
    "bfloat16": lambda: torch.tensor([1.0, NAN], dtype=torch.bfloat16),
    "float16": lambda: torch.tensor([1.0, NAN], dtype=torch.float16),
    "float8_e4m3fn": lambda: torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda: torch.tensor([1.0, INF]).to(torch.float8_e5m2),
    "complex": lambda: torch.tensor([1 + 1j, complex(0, NAN)]),
    "conjugate": lambda: torch.tensor([1 + 1j, complex(0, NAN)]).conj(),
    "sparse": lambda: coo(1.0, NAN),
    "csr": lambda: torch.tensor([[0.0, NAN]]).to_sparse_csr(),
    "transposed": lambda: torch.tensor([[1.0, 2.0], [3.0, NAN]]).t(),
    "expanded": lambda: torch.tensor([NAN]).expand(3, 4),
    "strided": lambda: torch.tensor([1.0, 2.0, NAN, 4.0])[::2],
    "scalar": lambda: torch.tensor(NAN),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.tensor([NAN])], layout=torch.jagged),
    "parameter": lambda: nn.Parameter(torch.tensor([NAN])),
}
GOOD = {
    "integers": lambda: torch.arange(5),
    "booleans": lambda: torch.ones(3, dtype=torch.bool),
    "nothing": lambda: None,
    "empty": lambda: torch.empty(0, 3),
    "meta": lambda: torch.empty(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "empty sparse": lambda: torch.sparse_coo_tensor(size=(3,), check_invariants=True),
    "text": lambda: "text",
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
}


class TestKindsOfOutputs:
    @pytest.mark.parametrize("name", BAD)
    @pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
    def test_bad_value_is_found_in(self, hook, name):
        model = nn.Sequential(nn.Identity(), Source(BAD[name]))
        hook.start("nan")
        model(torch.ones(1))
        assert (hook.incident["module"], hook.incident["where"]) == ("1", "output")

    @pytest.mark.parametrize("name", GOOD)
    @pytest.mark.filterwarnings("ignore:.*quantiz.*")
    def test_nothing_is_found_in(self, hook, name):
        model = nn.Sequential(nn.Identity(), Source(GOOD[name]))
        hook.start("nan")
        model(torch.ones(1))
        assert hook.incidents == []

    def test_subclass_of_tensor_is_looked_at(self, hook):
        class Image(torch.Tensor):
            pass

        hook.start("nan")
        nn.Sequential(Source(lambda: torch.tensor([NAN]).as_subclass(Image)))(torch.ones(1))
        assert hook.incident["module"] == "0"


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
        assert f"first NaN: {layer} gradient at step 3" in hook.incident["message"]

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
        assert hook.incident["parameter"] == "bias"

    def test_parameter_of_a_second_model_has_its_name(self, hook):
        first, second = net(), nn.Linear(4, 1)
        hook.start("nan")
        train(first, steps=1)
        second.weight.register_hook(lambda g: g * NAN)
        train(second, steps=1, at=0)
        assert found(hook.incident)[:2] == ("#2.(root)", "grad")

    def test_loss_has_no_module(self, hook):
        hook.start("nan")
        train(net(), loss=lambda out, step: out.mean() * (NAN if step >= 3 else 1))
        assert found(hook.incident) == ("", "loss", "nan", 3)
        assert hook.incident["message"].startswith("first NaN: loss at step 3")

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
        hook.start("nan")
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
        assert hook.incident["where"] == "grad"
        assert hook.value("nan_amp_skipped_steps") == 0


def scaled_training(model, optimizer, scaler, *, steps, accumulate=1, set_to_none=True):
    """Train as torch's AMP recipe says; gives the number of steps that the scaler skipped."""
    skipped = 0
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(accumulate):
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(torch.randn(16, 4))
                value = functional.mse_loss(out.float(), torch.ones(16, 1)) / accumulate
            scaler.scale(value).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
    return skipped


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


class TestWhatIsSaid:
    def test_step_that_was_not_looked_at_is_looked_at_as_far_as_outputs_are_there(self, hook):
        model = net()
        hook.start("nan", every=4)
        train(model, steps=8, strike=lambda: model.head.register_forward_hook(lambda _m, _i, o: o * INF))
        assert found(hook.incident) == ("head", "output", "inf", 3)
        assert (hook.incident["is_exact"], hook.incident["since_step"]) == (True, 3)
        assert hook.incident["stack"] == ["(root)", "head"]
        assert (hook.incident["inf_count"], hook.incident["shape"]) == (5, [5, 1])
        before = [call["module"] for call in hook.incident["calls_before"]]
        assert before[-2:] == ["layers.3", "layers"]

    def test_small_outputs_are_there_to_be_traced_back_also_where_nothing_else_needs_them(self, hook):
        model = net()
        hook.start("nan", every=4)
        train(model, steps=8, strike=lambda: model.layers[2].fc.register_forward_hook(poison(NAN)))
        assert found(hook.incident) == ("layers.2.fc", "output", "nan", 3)
        assert hook.incident["is_exact"] is True

    def test_where_outputs_are_gone_it_says_in_which_modules_it_may_have_been_born(self, hook):
        hook.pretend(large=True)
        model = net()
        hook.start("nan", every=4)
        train(model, steps=8, strike=lambda: model.layers[2].fc.register_forward_hook(poison(NAN)))
        incident = hook.incident
        assert found(incident) == ("layers.2", "output", "nan", 3)
        assert incident["or_in"] == ["layers.2.fc", "layers.2.act"]  # nothing needs these two for the backward
        assert incident["is_exact"] is False
        assert "born there, or in layers.2.fc, layers.2.act, whose outputs are gone" in incident["message"]

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
        assert incident["stack"] == ["(root)", "1"]
        assert "1.project" not in incident.get("or_in", [])

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
        assert hook.incident["is_exact"] is False
        assert "it may be older" in hook.incident["message"]
        assert "(counted from the attach)" in hook.incident["message"]

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
    """What is seen in a step in which the modules are not looked at: here all but steps 1, 5, 9."""

    @pytest.mark.parametrize(("layer", "owner"), [("embed", "embed"), ("layers.2.fc", "layers.2.fc")])
    def test_bad_weight_is_named_with_the_step_whose_optimizer_may_have_made_it(self, hook, layer, owner):
        model = net()
        hook.start("nan", every=4)
        train(model, strike=lambda: model.get_submodule(layer).weight.data.view(-1)[:1].fill_(NAN))
        assert found(hook.incident) == (owner, "param", "nan", 3)
        assert (hook.incident["is_exact"], hook.incident["since_step"]) == (False, 2)

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
        assert hook.incident["is_exact"] is True

    def test_parameter_whose_bad_gradient_came_first_is_named(self, hook):
        model = net()
        hook.start("nan", every=4)
        hooked = model.layers[2].register_forward_hook
        train(model, strike=lambda: hooked(lambda _m, _i, o: o.register_hook(lambda g: g * NAN) and None))
        assert found(hook.incident) == ("layers.2.fc", "grad", "nan", 3)
        assert hook.incident["is_exact"] is False

    def test_module_is_named_when_it_makes_another_one_and_the_first_was_thrown_away(self, hook):
        hook.pretend(large=True)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        hook.start("nan", every=4)
        for step in range(1, 8):
            if step == 3:
                model.layers[2].fc.register_forward_hook(poison(NAN))
            value = model(torch.randn(5, 4)).mean()
            if value.isfinite():  # a training loop that looks after itself
                optimizer.zero_grad()
                value.backward()
            optimizer.step()
        first, second = hook.incidents
        assert found(first) == ("layers.2", "output", "nan", 3)
        assert (first["is_exact"], first["since_step"]) == (False, 3)
        assert found(second) == ("layers.2.fc", "output", "nan", 4)
        assert (second["is_exact"], second["since_step"]) == (False, 2)
        assert second["first_seen"] == {"step": 3, "module": "layers.2", "where": "output"}
        assert hook.metric("nan_origin") == {("layers.2.fc", "output", "nan"): 1}
        assert hook.value("nan_first_step") == 3

    def test_parameters_that_are_bad_for_it_are_not_taken_for_the_origin(self, hook):
        hook.pretend(large=True)
        model = net()
        hook.start("nan", every=4)
        train(model, steps=8, strike=lambda: model.layers[2].fc.register_forward_hook(poison(NAN)))
        assert found(hook.incident) == ("layers.2", "output", "nan", 3)
        assert any("cannot be told any more" in line for line in hook.logs)
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
        assert found(hook.incident)[:2] == ("#2.(root)", "output")

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
        *_, last = hook.incident["python_stack"]
        assert "test_nan.py" in last
        assert last.endswith(" train")


class TestInPlace:
    def test_module_that_changed_its_inputs_is_named_and_they_are_called_unknown(self, hook):
        class Spoiler(nn.Module):
            def forward(self, x):
                x.view(-1)[0] = NAN
                return x.sum()

        hook.start("nan")
        nn.Sequential(nn.Identity(), Spoiler())(torch.ones(4))
        assert found(hook.incident)[:3] == ("1", "output", "nan")
        assert hook.incident["inputs"] == "unknown"
        assert "changed its inputs in place" in hook.incident["message"]

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
        calls = hook.incident["calls_before"]
        assert [call["module"] for call in calls] == ["layers.0.act", "layers.0", "layers.1.norm"]
        assert all(call["min"] <= call["max"] and call["norm"] > 0 for call in calls[1:])

    def test_steps_before_show_what_changed(self, hook):
        hook.start("nan")
        model = net()
        train(model, at=4, strike=lambda: model.head.register_forward_hook(poison(NAN)))
        steps = hook.incident["steps_before"]
        assert [one["step"] for one in steps] == [1, 2, 3]
        assert all(one["loss"] > 0 and one["largest_gradient"] > 0 and one["lr"] == 0.01 for one in steps)

    def test_nothing_is_kept_alive(self, hook):
        model, kept = net(), []
        model.layers[0].register_forward_hook(lambda _m, _i, o: kept.append(weakref.ref(o)))
        hook.start("nan")
        with torch.no_grad():
            model(torch.randn(5, 4))
        assert [ref() for ref in kept] == [None]


class TestPolicy:
    def test_raise_raises_in_the_training_code(self, hook):
        model = net()
        hook.start("nan", policy="raise")
        with pytest.raises(FloatingPointError, match=r"first NaN: layers\.2\.fc output at step 3"):
            train(model, strike=lambda: model.layers[2].fc.register_forward_hook(poison(NAN)))
        assert hook.value("nan_policy", "raise") == 1
        assert [one["kind"] for one in hook.incidents] == ["training_changed", "nan"]
        model.layers[2].fc._forward_hooks.clear()
        train(model)  # what it left behind does not stand in the way

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
        wait_until(lambda: [one for one in hook.incidents if one["kind"] == "paused"], what="the pause")
        assert not done.wait(0.5)
        assert hook.configure("nan", policy="report") == {"policy": "report"}
        thread.join(60)
        assert done.is_set()
        assert hook.metric("plugin_changes_training") == {}

    def test_detach_lets_a_paused_training_go_on(self, hook):
        thread = threading.Thread(target=train, args=(net(),), kwargs={"loss": lambda out, _step: out.mean() * NAN})
        hook.start("nan", policy="pause")
        thread.start()
        wait_until(lambda: [one for one in hook.incidents if one["kind"] == "paused"], what="the pause")
        hookd.stop(0.5)
        thread.join(60)
        assert not thread.is_alive()

    def test_policy_must_be_one_of_four(self, hook):
        with pytest.raises(PluginError, match="policy must be one of report, raise, pause, skip"):
            hook.start("nan", policy="zero")

    def test_by_default_it_is_no_mutator(self, hook):
        hook.start("nan")
        assert hook.plugin("nan").mutates is False


class TestOnADevice:
    """What is on a device is judged a step later: here with the host's memory in the part of the device's."""

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


def call(module, kind, *stack, inputs="", where="output"):
    return Event(where, kind, module, 1, stack, inputs)


class TestJudge:
    def test_caller_decides_about_bad_inputs(self):
        judge = Judge(3)
        assert judge.call(call("a.b", "nan", "r", "a", "a.b", inputs="nan")) is None
        origin = judge.call(call("a", "", "r", "a", inputs="nan"))
        assert origin is None
        origin = judge.call(call("r", "nan", "r"))
        assert (origin.module, origin.where) == ("r", "output")

    def test_sibling_does_not_decide(self):
        judge = Judge(3)
        assert judge.call(call("a", "nan", "r", "a", inputs="nan")) is None
        assert judge.call(call("b", "", "r", "b")) is None
        assert judge.pending

    def test_skipped_steps_in_a_row_become_an_incident(self):
        judge = Judge(2)
        for last in (False, True):
            judge.flow(call("a", "inf"))
            origin = judge.loss(call("", "", where="loss"), cleared={0}, is_clear=True)
            assert (origin is not None) == last

    def test_good_step_ends_the_row(self):
        judge = Judge(2)
        for _ in range(5):
            judge.flow(call("a", "inf"))
            assert judge.loss(call("", "", where="loss"), cleared={0}, is_clear=True) is None
            assert judge.step(call("", "", where="grad"), found_inf=False) is None
        assert judge.skipped == 5


def test_warnings_of_torch_are_not_provoked(hook):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = net()
        hook.start("nan")
        train(model, steps=2)
