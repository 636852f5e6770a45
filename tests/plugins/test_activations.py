"""hookd_activations gives the numbers that torch gives in float64, for every kind of output."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from hookd_activations.loss import PATIENCE
from hookd_activations.parameters import NOISE_SLICE, Noise
from torch import nn

from hookd import PluginError

NAN, INF = math.nan, math.inf
NAMES = ("mean", "std", "min", "max", "zero_ratio")


def expected(tensor):
    """The definitions, in float64."""
    x = tensor.double()
    finite = x[x.isfinite()]
    zeros = float((x == 0).double().mean())
    return (*(float(f) for f in (finite.mean(), finite.std(correction=0), finite.min(), finite.max())), zeros)


def shown(hook, module):
    return tuple(hook.value(f"activations_{name}", module) for name in NAMES)


def test_gauges_show_the_last_sampled_step(hook):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.start("activations", every=3)
    for step in range(1, 7):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        out = model(x)
        if step == 4:
            hidden = model[0].forward(x)
            want = {"0": hidden, "1": hidden.relu(), "2": out, "(root)": out}
        out.sum().backward()
        optimizer.step()
    for module, tensor in want.items():
        assert shown(hook, module) == pytest.approx(expected(tensor.detach()), rel=1e-5)


def test_first_step_is_sampled(hook):
    model = nn.Linear(4, 8)
    hook.start("activations")
    out = model(torch.randn(3, 4))
    assert shown(hook, "(root)") == pytest.approx(expected(out.detach()), rel=1e-5)


class Form(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x):
        return self.form(x)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: {"ids": torch.arange(3), "logits": x, "loss": x.sum()},
        lambda x: (torch.arange(3), x),
        lambda x: [None, {"deep": (x,)}],
        lambda x: x.relu_(),
    ],
)
def test_first_floating_tensor_of_a_nested_output_is_taken(hook, form):
    hook.start("activations")
    x = torch.rand(100) + 1
    Form(form)(x)
    assert shown(hook, "#Form.(root)") == pytest.approx(expected(x), rel=1e-5)


@pytest.mark.parametrize(
    "value",
    [None, torch.arange(3), torch.empty(0), torch.ones(3, dtype=torch.complex64), torch.empty(3, device="meta"),
     torch.ones(3).to_sparse()],
)  # fmt: skip
def test_outputs_without_real_numbers_have_no_series(hook, value):
    hook.start("activations")
    Form(lambda _: value)(torch.ones(1))
    assert hook.metric("activations_mean") == {}


def test_modules_are_selected_by_name_and_depth(hook):
    def model():
        return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2)))

    hook.start("activations", modules="0.*|1")
    model()(torch.ones(2))
    assert set(hook.metric("activations_mean")) == {("0.0",), ("0.1",), ("1",)}
    hook.stop()
    hook.start("activations", depth=1)
    model()(torch.ones(2))
    assert set(hook.metric("activations_mean")) == {("(root)",), ("0",), ("1",)}


def test_depth_must_not_be_negative(hook):
    with pytest.raises(PluginError, match="depth"):
        hook.start("activations", depth=-3)


def test_what_is_on_a_device_is_read_at_the_end_of_a_step(hook):
    hook.pretend(device=True)
    model = nn.Linear(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hook.start("activations")
    out = model(torch.randn(3, 4))
    assert hook.metric("activations_mean") == {}
    out.sum().backward()
    optimizer.step()
    assert shown(hook, "(root)") == pytest.approx(expected(out.detach()), rel=1e-5)


def test_training_is_bit_identical(hook):
    def weights():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
        return torch.cat([p.detach().view(-1) for p in model.parameters()])

    plain = weights()
    hook.start("activations", every=1)
    assert torch.equal(weights(), plain)


def test_gradients_weights_and_updates_are_those_of_the_step(hook):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.start("activations", every=1, parameters="true")
    model(torch.randn(16, 4)).square().mean().backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    after = dict(model.named_parameters())
    for name, own in (("0", ("0.weight", "0.bias")), ("2", ("2.weight", "2.bias"))):
        grad, weight, moved = (
            torch.cat([of(p).reshape(-1) for p in own]).double().norm().item()
            for of in (lambda p: after[p].grad, lambda p: before[p], lambda p: after[p].detach() - before[p])
        )
        assert hook.value("activations_grad_norm", name) == pytest.approx(grad)
        assert hook.value("activations_weight_norm", name) == pytest.approx(weight)
        assert hook.value("activations_update_ratio", name) == pytest.approx(moved / weight, rel=1e-4)
    grad = after["0.weight"].grad
    for name, want in {
        "mean": grad.mean(),
        "std": grad.std(correction=0),
        "absmax": grad.abs().max(),
        "norm": grad.norm(),
    }.items():
        assert hook.value(f"activations_param_grad_{name}", "0", "weight") == pytest.approx(
            want.item(), rel=1e-4, abs=1e-9
        )
    zeros = float((grad == 0).float().mean())
    assert hook.value("activations_param_grad_zero_ratio", "0", "weight") == pytest.approx(zeros)
    ratio = float((after["0.weight"].detach() - before["0.weight"]).norm() / before["0.weight"].norm())
    assert hook.value("activations_param_update_ratio", "0", "weight") == pytest.approx(ratio, rel=1e-4)
    assert hook.value("activations_param_norm", "2", "bias") == pytest.approx(before["2.bias"].norm().item())


def test_parameters_are_looked_at_where_a_model_is_called_in_parts(hook):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.start("activations", every=1)
    model(torch.randn(16, 4)).square().mean().backward()
    for _ in range(4):
        optimizer.step()
        before = model[1].weight.detach().clone(), model[1].bias.detach().clone()
        model[1](model[0](torch.randn(16, 4))).square().mean().backward()
    optimizer.step()
    assert hook.value("activations_weight_norm", "1") == pytest.approx(norm_of(before))


def norm_of(tensors) -> float:
    dense = [one.to_dense() if one.is_sparse else one for one in tensors]
    return torch.cat([one.detach().reshape(-1) for one in dense]).double().norm().item()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
def test_norms_of_a_module_are_over_all_its_parameters_whoever_steps_them(hook, is_whole, frozen):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    model[0].weight.requires_grad_(not frozen)
    weights = torch.optim.SGD([p for p in (model[0].weight, model[2].weight) if p.requires_grad], lr=0.1)
    biases = torch.optim.Adam([model[0].bias, model[2].bias])
    hook.start("activations", every=1)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        parameters = {name: [p.detach().clone() for p in model[int(name)].parameters()] for name in "02"}
        biases.step()
        if is_whole:  # else the weights stay as they are for good
            weights.step()
    for name, before in parameters.items():
        now = list(model[int(name)].parameters())
        assert hook.value("activations_grad_norm", name) == pytest.approx(
            norm_of(p.grad for p in now if p.requires_grad)
        )
        assert hook.value("activations_weight_norm", name) == pytest.approx(norm_of(before))
        moved = norm_of(p - old for p, old in zip(now, before, strict=True))
        assert hook.value("activations_update_ratio", name) == pytest.approx(moved / norm_of(before), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.bfloat16, torch.float64])
def test_norms_of_every_dtype_are_torchs(hook, dtype):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = (nn.Parameter(torch.randn(size, dtype=dtype)) for size in ((4, 4), (4,)))

        def forward(self, x):
            return x @ self.weight + self.bias

    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hook.start("activations", every=1)
    model(torch.randn(3, 4, dtype=dtype)).abs().square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()

    def norm(tensors):
        return torch.linalg.vector_norm(
            torch.cat([one.detach().reshape(-1) for one in tensors]).to(torch.complex128)
        ).item()

    moved = norm([p - old for p, old in zip(model.parameters(), before, strict=True)])
    found = [hook.value(f"activations_{name}", "(root)") for name in ("grad_norm", "weight_norm", "update_ratio")]
    want = [norm([p.grad for p in model.parameters()]), norm(before), moved / norm(before)]
    assert found == pytest.approx(want, rel=1e-2 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("kind", ["meta", "quantized"])
@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_of_a_module_with_a_parameter_whose_numbers_nobody_knows_no_norm_is_reported(hook, kind):
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.known = nn.Parameter(torch.ones(3))
            unknown = torch.quantize_per_tensor(torch.ones(4), 0.1, 3, torch.quint8)
            unknown = torch.empty(4, device="meta") if kind == "meta" else unknown
            self.unknown = nn.Parameter(unknown, requires_grad=False)
            self.whole = nn.Linear(3, 1)

        def forward(self, x):
            return self.whole(x * self.known)

    model = Partly()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    hook.start("activations", every=1)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert set(hook.metric("activations_weight_norm")) == set(hook.metric("activations_grad_norm")) == {("whole",)}


def test_a_sparse_gradient_has_each_row_once_in_its_norm(hook):
    model = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    hook.start("activations", every=1)
    model(torch.tensor([0, 0, 0, 2, 5, 5])).square().sum().backward()
    assert not model.weight.grad.is_coalesced()
    optimizer.step()
    assert hook.value("activations_grad_norm", "(root)") == pytest.approx(norm_of([model.weight.grad]))
    assert not model.weight.grad.is_coalesced(), "the training's own stays as it is"


@pytest.mark.parametrize(("spread", "want"), [(0.0, 0.0), (1.0, 0.5), (3.0, 0.9)])
def test_noise_is_the_share_of_the_gradient_that_differs_from_step_to_step(spread, want):
    """The gradients have a constant part and a part that is drawn anew: |G|^2 = 1 and tr(Cov e) = spread^2 per element."""
    torch.manual_seed(0)
    signal, noise = torch.randn(2 * NOISE_SLICE), Noise()
    ratios = []
    for _ in range(60):
        split = noise.split(*(float(x) for x in noise.sums(signal + spread * torch.randn_like(signal))))
        ratios.append(split[0] / split[1] if split[1] else 0.0)
    assert sum(ratios[-20:]) / 20 == pytest.approx(want, abs=0.03)


def test_modules_take_turns(hook):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.start("activations", every=1, rotate="true", types="Linear")
    seen = []
    for _ in range(3):
        model(torch.randn(16, 4)).sum().backward()
        optimizer.step()
        seen.append((len(hook.metric("activations_mean")), len(hook.metric("activations_grad_norm"))))
    assert seen == [(1, 1), (2, 2), (3, 3)]


def test_modules_are_selected_by_type(hook):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(4, 1)))
    hook.start("activations", types="Conv*|ReLU")
    model(torch.randn(1, 4))
    assert set(hook.metric("activations_mean")) == {("1",), ("2.0",)}


@pytest.mark.parametrize("options", [{}, {"depth": "1"}, {"modules": "2"}, {"rotate": "true"}], ids=str)
def test_the_norm_of_all_gradients_is_published_if_all_are_sampled(hook, options):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.start("activations", every=1, **options)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    known = [] if options else [torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()]
    assert list(hook.metric("activations_total_grad_norm").values()) == pytest.approx(known)


def test_the_distribution_comes_on_demand_only(hook):
    x = torch.randn(50_000) * 3
    hook.start("activations")
    Form(lambda _: x)(x)
    with pytest.raises(KeyError):
        hook.metric("activations_below_ratio")
    hook.stop()
    hook.start("activations", histogram="true")
    Form(lambda _: x)(x)
    shares = {float(le): share for (_, le), share in hook.metric("activations_below_ratio").items()}
    assert len(shares) == 9
    for edge, share in shares.items():
        assert share == pytest.approx(float((x <= edge).double().mean()), abs=1e-4)


def test_what_is_not_finite_is_counted(hook):
    hook.start("activations")
    Form(lambda x: torch.tensor([1.0, NAN, INF, -INF, -3.0]))(torch.ones(1))
    assert hook.value("activations_nonfinite_elements", "#Form.(root)") == 3
    assert hook.value("activations_absmax", "#Form.(root)") == 3
    assert hook.value("activations_norm", "#Form.(root)") == pytest.approx(math.sqrt(10))


def test_the_largest_magnitude_of_zeros_has_no_sign(hook):
    hook.start("activations", every=1)
    nn.ReLU()(-torch.ones(64))
    assert math.copysign(1.0, hook.value("activations_absmax", "#ReLU.(root)")) == 1.0


def test_the_loss_of_each_backward_is_shown_at_every_step(hook):
    hook.start("activations", every=100)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        losses = [(model(torch.randn(8, 4)).square().mean() + place) for place in range(6)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        assert hook.metric("activations_loss") == {(str(n),): losses[n].item() for n in range(4)}, step
    optimizer.zero_grad()
    (model(torch.randn(8, 4)) * float("nan")).mean().backward()
    assert math.isnan(hook.value("activations_loss", "0"))


@pytest.mark.parametrize(
    "divided", [lambda x, n: x / n, lambda x, n: x * (1 / n) * torch.tensor(2.0**8), lambda x, n: (x / n) / 1]
)
def test_a_loss_that_was_divided_for_its_accumulation_is_shown_as_the_trainer_knows_it(hook, divided):
    hook.start("activations", gradients="false")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    means = []
    for parts in (4, 4, 3, 1):
        losses = [model(torch.randn(8, 4)).square().mean() for _ in range(parts)]
        for loss in losses:
            divided(loss, parts).backward()
        optimizer.step()
        means.append(sum(divided(loss, parts).item() for loss in losses))
        model(torch.randn(8, 4))  # the step is over
        assert hook.value("activations_loss", "0") == pytest.approx(means[-1])
        assert set(hook.metric("activations_loss")) == {("0",)}
    (model(torch.randn(8, 4)) * math.nan).mean().backward()
    optimizer.step()
    model(torch.randn(8, 4))
    assert math.isnan(hook.value("activations_loss", "0"))
    assert hook.value("activations_cumulative_loss", "0") == pytest.approx(sum(means))
    assert hook.value("activations_losses", "0") == 4


@pytest.mark.parametrize(
    ("divisor", "is_one"),
    [
        (lambda own, total: torch.tensor(total), True),  # transformers' Trainer
        (lambda own, total: total, True),
        (lambda own, total: total + 6, True),  # it counts the labels before they are shifted
        (lambda own, total: torch.tensor(float(total)), True),
        (lambda own, total: torch.tensor(own), False),
        (lambda own, total: own + 1, False),
    ],
)
@pytest.mark.parametrize("is_on_device", [False, True])
def test_sums_over_targets_that_are_divided_by_all_of_them_are_one_loss(
    hook, monkeypatch, divisor, is_one, is_on_device
):
    if is_on_device:
        monkeypatch.setattr("hookd_activations.loss.Context.number", lambda *_: None)
    hook.start("activations", gradients="false")
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        targets = [torch.full((8,), number) for number in range(3)]
        for number, target in enumerate(targets):
            target[: number + 1] = -100
        counts = [int((target >= 0).sum()) for target in targets]
        losses = []
        for target, own in zip(targets, counts, strict=True):
            loss = nn.functional.cross_entropy(model(torch.randn(8, 4)), target, reduction="sum")
            loss = loss / divisor(own, sum(counts))
            losses.append(loss.item())
            loss.backward()
        optimizer.step()
        for _ in range(2):
            model(torch.randn(8, 4))
        expected = [sum(losses)] if is_one else losses
        assert hook.metric("activations_loss") == {(str(n),): pytest.approx(loss) for n, loss in enumerate(expected)}


def test_a_step_that_was_skipped_leaves_no_second_loss_behind_for_ever(hook):
    hook.start("activations", gradients="false")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for is_skipped in [True, *[False] * PATIENCE]:
        model(torch.randn(8, 4)).square().mean().backward()
        if not is_skipped:
            optimizer.step()
    assert set(hook.metric("activations_loss")) == {("0",), ("1",)}
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    assert set(hook.metric("activations_loss")) == {("0",)}


def test_a_backward_of_several_numbers_has_no_loss(hook):
    hook.start("activations")
    model = nn.Linear(4, 2)
    out = model(torch.randn(8, 4))
    out.backward(torch.ones_like(out))
    with pytest.raises(KeyError):
        hook.value("activations_loss", "0")


def test_an_unload_frees_its_objects_before_any_collection(hook):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def recorders():
        return sum(1 for one in gc.get_objects() if type(one) is Noise)

    gc.collect()
    before = recorders()
    gc.disable()
    try:
        hook.start("activations", every=1)
        for _ in range(3):
            model(torch.randn(16, 4)).sum().backward()
            optimizer.step()
        assert recorders() > before
        hook.stop()
        assert recorders() == before
    finally:
        gc.enable()
