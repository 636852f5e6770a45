"""Cases that must not deceive hookd_nan: values that a call writes or overwrites itself, and values that may be bad."""

from __future__ import annotations

import math
import operator
from collections import UserDict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

NAN, INF = math.nan, math.inf
AT, STEPS = 6, 8


class Born(nn.Module):
    """Makes a bad value when it is switched on."""

    def __init__(self, value=NAN):
        super().__init__()
        self.value, self.is_on = value, False

    def forward(self, x):
        return x * self.value if self.is_on else x * 1


class BatchNormAfterOwnCode(nn.Module):
    """Makes a bad value in its own code, which batch normalization is given."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head, self.is_on = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1), False

    def forward(self, x):
        x = self.first(x)
        return self.head(self.norm(x * NAN if self.is_on else x))


def train(
    model, *, strike=None, batch=lambda: torch.randn(5, 4), wrap=lambda x: x, loss=torch.mean, make=torch.optim.SGD
):
    """Train; `strike` is called, and `batch` gives the input, in step 6 of 8."""
    optimizer = make(model.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        if step == AT and strike is not None:
            strike()
        optimizer.zero_grad()
        loss(model(wrap(batch() if step == AT else torch.randn(5, 4)))).backward()
        optimizer.step()


def place(incident):
    return incident.module, incident.fields["where"], incident.kind, incident.step


def bad_batch():
    return torch.full((5, 4), NAN)


@pytest.mark.parametrize("every", [1, 4])
class TestBuffers:
    def test_bad_batch_is_not_taken_for_a_bad_running_mean(self, hook, every):
        hook.start("nan", every=every)
        train(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)), batch=bad_batch)
        assert place(hook.incident) == ("(root)", "input", "nan", AT)

    def test_module_before_a_batch_normalization_is_named(self, hook, every):
        model = nn.Sequential(nn.Linear(4, 4), Born(), nn.BatchNorm1d(4), nn.Linear(4, 1))
        hook.start("nan", every=every)
        train(model, strike=lambda: setattr(model[1], "is_on", True))
        assert place(hook.incident) == ("1", "output", "nan", AT)

    def test_own_code_before_a_batch_normalization_is_named(self, hook, every):
        model = BatchNormAfterOwnCode()
        hook.start("nan", every=every)
        train(model, strike=lambda: setattr(model, "is_on", True))
        assert place(hook.incident) == ("(root)", "output", "nan", AT)

    def test_running_mean_that_is_used_is_named(self, hook, every):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 1))
        hook.start("nan", every=every)
        train(model, strike=lambda: model[1].running_mean.fill_(NAN))
        assert place(hook.incident) == ("1", "param", "nan", AT)
        assert (hook.incident.fields["parameter"], hook.incident.fields["is_buffer"]) == ("running_mean", True)
        assert "1 (BatchNorm1d) buffer running_mean" in hook.incident.message

    def test_infinity_that_a_buffer_may_well_have_is_not_blamed(self, hook, every):
        born = Born()
        born.register_buffer("best", torch.tensor(INF))
        model = nn.Sequential(nn.Linear(4, 4), born, nn.Linear(4, 1))
        model.register_buffer("best", torch.tensor(INF))
        hook.start("nan", every=every)
        train(model, strike=lambda: setattr(born, "is_on", True))
        assert place(hook.incident) == ("1", "output", "nan", AT)

    def test_buffer_that_the_call_may_have_written_is_reported_and_not_blamed(self, hook, every):
        class Averages(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("mean", torch.zeros(()))
                self.by = 1.0

            def forward(self, x):
                x = x / self.by
                self.mean.lerp_(x.detach().mean(), 0.1)
                return x

        model = nn.Sequential(nn.Linear(4, 4), Averages(), nn.Linear(4, 1))
        hook.start("nan", every=every)
        train(model, strike=lambda: setattr(model[1], "by", 0.0))
        assert place(hook.incident) == ("1", "output", "inf", AT)
        assert hook.incident.fields["is_exact"] is False
        assert hook.incident.fields["buffer"] == "mean"
        assert "its buffer mean is bad as well" in hook.incident.message


@pytest.mark.parametrize("every", [1, 4])
class TestKind:
    def test_kind_is_that_of_the_tensor_that_is_named(self, hook, every):
        """The infinity of the named module has become a NaN in the model's output."""
        model = nn.Sequential(nn.Linear(4, 4), Born(INF), nn.LayerNorm(4), nn.Linear(4, 1))
        hook.start("nan", every=every)
        train(model, strike=lambda: setattr(model[1], "is_on", True))
        assert place(hook.incident) == ("1", "output", "inf", AT)
        assert (hook.incident.fields["nan_count"], hook.incident.fields["inf_count"]) == (0, 20)
        assert {kind for _, _, kind in hook.metric("nan_origin")} == {"inf"}

    def test_kind_is_that_of_the_parameter(self, hook, every):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
        hook.start("nan", every=every)
        train(model, strike=lambda: model[0].weight.data.fill_(INF))
        assert place(hook.incident) == ("0", "param", "inf", AT)

    def test_counts_are_those_of_a_tensor_of_that_kind(self, hook, every):
        class Two(nn.Module):
            def forward(self, x):
                return x / 0 if x.isnan().all() else x / 0.0, x * NAN

        hook.start("nan", every=every)
        for _ in range(2):
            model = nn.Sequential(nn.Identity(), Two())
            model(torch.ones(3))
        assert hook.incident.kind == "nan"
        assert hook.incident.fields["nan_count"] == 3


class Normalize(nn.Module):
    """Changes its input in place; of a constant batch it makes 0 / 0."""

    def forward(self, x):
        return x.sub_(x.mean()).div_(x.std())


@pytest.mark.parametrize("every", [1, 4])
def test_batch_that_the_model_has_changed_in_place_is_not_blamed(hook, every):
    model = nn.Sequential(nn.Identity(), Normalize(), nn.Linear(4, 1))
    hook.start("nan", every=every)
    train(model, batch=lambda: torch.full((5, 4), 2.0))
    assert place(hook.incident) == ("1", "output", "nan", AT)
    assert (hook.incident.fields["is_exact"], hook.incident.fields["inputs"]) == (False, "unknown")
    assert "has changed its inputs in place" in hook.incident.message


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
def test_nested_tensor_without_one_size_is_named(hook):
    class Ragged(nn.Module):
        def forward(self, x):
            return torch.nested.nested_tensor([x[0].detach() * NAN, x[1, :3].detach()])

    hook.start("nan")
    nn.Sequential(nn.Identity(), Ragged())(torch.randn(5, 4))
    first = hook.incidents[0]
    assert (first.module, first.fields["where"], first.fields["nan_count"], first.fields["elements"]) == (
        "1",
        "output",
        4,
        7,
    )
    assert first.fields["shape"] is None


@pytest.mark.parametrize("every", [1, 4])
def test_parameter_that_an_optimizer_broke_is_as_old_as_that_step(hook, every):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.01)
    hook.start("nan", every=every)
    for step in range(1, 8):
        optimizer.param_groups[1]["lr"] = NAN if step == 5 else 0.01
        optimizer.zero_grad()
        model(torch.randn(5, 4)).mean().backward()
        optimizer.step()
    assert place(hook.incident) == ("1", "param", "nan", 6)
    assert (hook.incident.fields["is_exact"], hook.incident.fields["since_step"]) == (False, 5)


class Borrower(nn.Module):
    """Uses what modules in it hold, without a call of theirs."""

    def __init__(self):
        super().__init__()
        self.first, self.proj = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return nn.functional.linear(self.first(x), self.proj.weight, self.proj.bias) - self.norm.running_mean


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x[None], x[None], x[None])[0][0]


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(
    ("make", "owner", "name"),
    [
        (Attention, "1.attention.out_proj", "weight"),
        (Attention, "1.attention", "in_proj_weight"),
        (Borrower, "1.proj", "bias"),
        (Borrower, "1.norm", "running_mean"),
    ],
)
def test_what_is_used_without_a_call_of_its_module_is_named(hook, every, make, owner, name):
    model = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 1))
    model[1].get_submodule(owner[2:]).eval()
    hook.start("nan", every=every)
    tensor = operator.attrgetter(f"{owner[2:]}.{name}")(model[1])
    train(model, strike=lambda: tensor.data.view(-1)[:1].fill_(NAN))
    assert place(hook.incident) == (owner, "param", "nan", AT)
    assert hook.incident.fields["parameter"] == name
    assert hook.incident.fields.get("is_buffer", False) is (name == "running_mean")


def test_a_bad_tensor_that_nothing_uses_is_not_blamed_for_what_a_batch_brings(hook):
    model = nn.Sequential(nn.Linear(4, 4), Borrower(), nn.Linear(4, 1))
    model[1].unused = nn.Linear(4, 4)
    model[1].unused.weight.data.fill_(NAN)
    hook.start("nan", every=1)
    train(model, batch=bad_batch)
    assert place(hook.incident) == ("(root)", "input", "nan", AT)


class Beside(nn.Module):
    """Makes a NaN when it is switched on; its bad buffer is unrelated to that."""

    def __init__(self):
        super().__init__()
        self.first, self.spare, self.ranges, self.is_on = nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity(), False
        self.ranges.register_buffer("least", torch.tensor(INF))

    def forward(self, x):
        return self.first(x) * (NAN if self.is_on else 1)


class Normalizes(nn.Module):
    """Uses the buffers of a batch normalization in training that it never calls."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return nn.functional.batch_norm(x, self.norm.running_mean, self.norm.running_var)


class Transposed(nn.Module):
    """Uses the weight of a module that is somewhere else, by a reference that torch does not know."""

    def __init__(self, other):
        super().__init__()
        self.other = (other,)

    def forward(self, x):
        return x @ self.other[0].weight.T


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(("adam", "expected"), [(False, ("1.spare", "param")), (True, ("1", "output"))])
def test_a_bad_parameter_is_blamed_as_far_as_it_is_known_to_be_used(hook, every, adam, expected):
    model = nn.Sequential(nn.Linear(4, 4), Beside(), nn.Linear(4, 1))
    model[1].spare.weight.data.fill_(NAN)
    model[1].ranges.least.zero_()
    hook.start("nan", every=every)
    train(model, strike=lambda: setattr(model[1], "is_on", True), make=torch.optim.Adam if adam else torch.optim.SGD)
    assert place(hook.incident) == (*expected, "nan", AT)
    assert hook.incident.fields["is_exact"] is adam
    assert hook.incident.fields.get("if_used_in") == (None if adam else "1")


@pytest.mark.parametrize("every", [1, 4])
def test_an_infinity_in_a_buffer_inside_is_reported_and_not_blamed(hook, every):
    model = nn.Sequential(nn.Linear(4, 4), Beside(), nn.Linear(4, 1))
    hook.start("nan", every=every)
    train(model, strike=lambda: setattr(model[1], "is_on", True))
    assert place(hook.incident) == ("1", "output", "nan", AT)
    assert (hook.incident.fields["is_exact"], hook.incident.fields["buffer"]) == (False, "1.ranges least")


@pytest.mark.parametrize("every", [1, 4])
def test_a_buffer_of_a_module_in_training_that_nobody_calls_is_not_overlooked(hook, every):
    model = nn.Sequential(nn.Linear(4, 4), Normalizes(), nn.Linear(4, 1))
    hook.start("nan", every=every)
    train(model, strike=lambda: model[1].norm.running_var.fill_(NAN))
    assert place(hook.incident) == ("1.norm", "param", "nan", AT)
    assert (hook.incident.fields["parameter"], hook.incident.fields["if_used_in"]) == ("running_var", "1")


@pytest.mark.parametrize("every", [1, 4])
def test_a_bad_parameter_somewhere_else_makes_nothing_exact(hook, every):
    table = nn.Embedding(5, 4)
    model = nn.Sequential(table, nn.Linear(4, 4), Transposed(table))
    hook.start("nan", every=every)
    tokens = torch.tensor([0, 1, 2])
    train(model, strike=lambda: table.weight.data[4].fill_(NAN), batch=lambda: tokens, wrap=lambda x: tokens)
    assert hook.incident.fields["is_exact"] is False
    assert (hook.incident.module, hook.incident.fields.get("elsewhere")) in {("2", "0 parameter weight"), ("0", None)}


class Bag:
    """An object of somebody's, into which nobody looks."""

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("every", [1, 4])
class TestWhatIsNotLookedInto:
    def test_input_in_an_object_makes_nothing_exact(self, hook, every):
        class Opens(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 1)

            def forward(self, bag):
                return self.fc(bag.x)

        hook.start("nan", every=every)
        train(Opens(), batch=lambda: torch.full((5, 4), NAN), wrap=Bag)
        assert hook.incident.fields["is_exact"] is False
        assert hook.incident.fields["inputs"] == "partly"
        assert "was given more than can be checked" in hook.incident.message

    def test_output_of_which_not_all_is_seen_is_among_the_places(self, hook, every):
        class Many(nn.Module):
            is_on = False

            def forward(self, x):
                found = [x * 1 for _ in range(80)]
                return [*found[:70], found[70] * NAN, *found[71:]] if self.is_on else found

        class Sums(nn.Module):
            def __init__(self):
                super().__init__()
                self.many, self.fc = Many(), nn.Linear(4, 1)

            def forward(self, x):
                return sum(self.fc(one) for one in self.many(x))

        model = Sums()
        hook.start("nan", every=every)
        train(model, strike=lambda: setattr(model.many, "is_on", True))
        assert hook.incident.fields["is_exact"] is False
        assert "many" in hook.incident.fields["or_in"]

    def test_module_that_is_called_under_a_transform_is_among_the_places(self, hook, every):
        class Mapped(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.fc = Born(), nn.Linear(4, 1)

            def forward(self, x):
                return self.fc(torch.func.vmap(self.inner)(x))

        model = nn.Sequential(nn.Linear(4, 4), Mapped(), nn.Linear(1, 1))
        hook.start("nan", every=every)
        train(model, strike=lambda: setattr(model[1].inner, "is_on", True))
        assert place(hook.incident) == ("1", "output", "nan", AT)
        assert hook.incident.fields["or_in"] == ["1.inner"]


@pytest.mark.parametrize("form", [lambda x: SimpleNamespace(a=x), lambda x: UserDict(a=[x]), lambda x: deque([x])])
def test_containers_of_the_standard_library_are_looked_into(hook, form):
    class Wraps(nn.Module):
        def forward(self, x):
            return form(x * NAN)

    hook.start("nan")
    nn.Sequential(nn.Identity(), Wraps())(torch.ones(3))
    assert (hook.incident.module, hook.incident.fields["nan_count"]) == ("1", 3)


class Log(nn.Module):
    """Returns -inf for non-positive inputs, when it is switched on."""

    is_on = False

    def forward(self, x):
        return torch.log(torch.relu(x)) if self.is_on else x


@pytest.mark.parametrize("every", [1, 4])
class TestMinusInfinity:
    def test_loss_that_is_infinite_by_it_tells_which_module_gave_it(self, hook, every):
        model = nn.Sequential(nn.Linear(4, 4), Log())
        hook.start("nan", every=every)
        train(model, strike=lambda: setattr(model[1], "is_on", True), loss=lambda out: out.square().mean())
        assert place(hook.incident) == ("", "loss", "inf", AT)
        assert (hook.incident.fields["is_exact"], hook.incident.fields["neginf_in"]) == (False, ["1"])
        assert "the output of 1 has -inf, which is taken for a mask unless neginf=true" in hook.incident.message

    def test_module_that_makes_it_is_named_where_that_is_asked_for(self, hook, every):
        model = nn.Sequential(nn.Linear(4, 4), Log())
        hook.start("nan", every=every, neginf=True)
        train(model, strike=lambda: setattr(model[1], "is_on", True), loss=lambda out: out.square().mean())
        assert place(hook.incidents[0])[:3] == ("1", "output", "inf")


def test_module_that_makes_a_nan_of_minus_infinity_is_reported_with_it(hook):
    hook.start("nan")
    nn.Sequential(Log(), nn.Softmax(-1))(torch.full((2, 4), -INF))
    assert place(hook.incident)[:2] == ("1", "output")
    assert hook.incident.fields["neginf_in"] == "inputs"
