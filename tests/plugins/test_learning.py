"""Each mistake by which a model does not learn is found, and the same training without it has no finding."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

X, Y = torch.linspace(-1, 1, 64).reshape(8, 8), torch.arange(8) % 3


class Net(nn.Module):
    """A backbone and a head."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.drop(self.backbone(x)))


def train(model, optimizers, steps, *, clears=True, before=lambda step: None):
    for step in range(steps):
        before(step)
        if clears:
            for optimizer in optimizers:
                optimizer.zero_grad()
        cross_entropy(model(X), Y).backward()
        for optimizer in optimizers:
            optimizer.step()


def sgd(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr)


def found(hook):
    return [(incident.kind, incident.message) for incident in hook.incidents]


def test_a_training_without_mistakes_has_no_findings(hook):
    model = Net()
    hook.start("learning", every=1)
    train(model, [sgd(model.backbone.parameters()), sgd(model.head.parameters())], 40)
    model.eval()
    with torch.no_grad():
        model(X)
    model.train()
    train(model, [sgd(model.parameters())], 40)
    assert not found(hook)


def test_parameters_that_no_optimizer_has(hook):
    model = Net()
    optimizer = sgd(model.head.parameters())
    hook.start("learning", every=1)
    train(model, [optimizer], 12)
    ((kind, message),) = found(hook)
    assert kind == "not_optimized"
    assert message.startswith(
        "4 of 6 parameters of (root) get gradients, but no optimizer has them, so they never change: backbone.0.w"
    )
    assert hook.incident.fields["parameters"][0] == "backbone.0.weight"
    assert hook.value("learning_finding", "not_optimized") == 1
    optimizer.add_param_group({"params": list(model.backbone.parameters())})
    train(model, [optimizer], 4)
    assert hook.value("learning_finding", "not_optimized") == 0


def test_parameters_without_an_optimizer_can_be_swapped(hook):
    """torch refuses to swap a tensor that has a weak reference, as `module.to()` may do."""
    model = Net()
    hook.start("learning", every=1)
    train(model, [sgd(model.head.parameters())], 12)
    model.zero_grad()
    torch.utils.swap_tensors(model.backbone[0].weight, nn.Parameter(torch.ones(16, 8)))
    assert model.backbone[0].weight[0, 0] == 1


def test_parameters_that_code_of_the_training_changes_need_no_optimizer(hook):
    model = Net()

    def update(_):
        with torch.no_grad():
            for parameter in model.backbone.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None

    hook.start("learning", every=1)
    train(model, [sgd(model.head.parameters())], 30, before=update)
    assert "not_optimized" not in dict(found(hook))


def test_frozen_parameters_need_no_optimizer(hook):
    model = Net()
    model.backbone.requires_grad_(False)
    hook.start("learning", every=1)
    train(model, [sgd(model.head.parameters())], 30)
    assert not found(hook)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda model: sgd(Net().parameters()), "no model that is called has them. Was the model replaced"),
        (lambda model: sgd(model.extra.parameters()), "is the loss detached from the model"),
    ],
    ids=["of-another-model", "unused"],
)
def test_an_optimizer_without_gradients(hook, make, why):
    model = Net()
    model.extra = nn.Linear(2, 2)
    useful = sgd([p for name, p in model.named_parameters() if not name.startswith("extra")])
    hook.start("learning", every=1)
    train(model, [useful, make(model)], 6)
    ((kind, message),) = found(hook)
    assert kind == "no_gradients"
    assert why in message


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)])
def test_a_learning_rate_of_zero(hook, lr):
    model = Net()
    hook.start("learning", every=1)
    train(model, [sgd(model.parameters(), lr)], 6)
    assert [kind for kind, _ in found(hook)] == ["zero_lr"]


def test_learning_rates_are_published_as_long_as_their_optimizer_lives(hook):
    first, second = Net(), Net()
    optimizers = [
        sgd(first.parameters(), 0.1),
        torch.optim.Adam([{"params": [p]} for p in second.parameters()], lr=0.5),
    ]
    hook.start("learning", every=1)
    train(first, optimizers, 3)
    groups = {("#2.Adam", str(group)): 0.5 for group in range(len(list(second.parameters())))}
    assert hook.metric("learning_rate") == {("SGD", "0"): 0.1, **groups}
    del optimizers[1]
    gc.collect()
    train(first, optimizers, 2, before=lambda _: optimizers[0].param_groups[0].update(lr=0.2))
    assert hook.metric("learning_rate") == {("SGD", "0"): 0.2}


def test_a_warm_up_that_begins_at_zero_is_no_learning_rate_of_zero(hook):
    model = Net()
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    hook.start("learning", every=1)
    train(model, [optimizer], 20, before=lambda step: step and scheduler.step())
    assert not found(hook)


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_that_are_never_cleared(hook, clears):
    model = Net()
    hook.start("learning", every=1)
    train(model, [sgd(model.parameters(), 0.001)], 8, clears=clears)
    assert [kind for kind, _ in found(hook)] == ([] if clears else ["not_cleared"])


def test_gradients_of_other_losses_may_be_there_when_a_backward_begins(hook):
    """A GAN: the generator's backward leaves gradients in the discriminator, which its own step clears."""
    maker, judge = nn.Linear(4, 8), Net()
    ours, theirs = sgd(maker.parameters()), sgd(judge.parameters())
    hook.start("learning", every=1)
    for _ in range(20):
        theirs.zero_grad()
        cross_entropy(judge(maker(torch.ones(8, 4)).detach()), Y).backward()
        theirs.step()
        ours.zero_grad()
        (-cross_entropy(judge(maker(torch.ones(8, 4))), Y)).backward()
        ours.step()
    assert not found(hook)


def test_accumulated_gradients_are_cleared_once_per_step(hook):
    model = Net()
    optimizer = sgd(model.parameters())
    hook.start("learning", every=1)
    for _ in range(12):
        optimizer.zero_grad(set_to_none=False)
        for _ in range(4):
            (cross_entropy(model(X), Y) / 4).backward()
        optimizer.step()
    assert not found(hook)


def test_a_closure_that_clears_is_seen(hook):
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(X), Y)
        loss.backward()
        return loss

    hook.start("learning", every=1)
    for _ in range(10):
        optimizer.step(closure)
    assert not found(hook)


def test_a_model_that_is_trained_in_eval(hook):
    model = Net().eval()
    hook.start("learning", every=1)
    train(model, [sgd(model.parameters())], 8)
    ((kind, message),) = found(hook)
    assert kind == "eval_mode"
    assert message.startswith(
        "(root) is trained in eval(), so its Dropout and BatchNorm do not act as in training (drop, backbone.1)"
    )


def test_dropout_alone_in_eval(hook):
    model = Net()
    model.drop.eval()
    hook.start("learning", every=1)
    train(model, [sgd(model.parameters())], 8)
    assert found(hook) == [
        ("eval_mode", "drop of (root) is in eval() while the rest is trained in train(): call train() on the model")
    ]


def test_a_frozen_backbone_may_be_in_eval(hook):
    model = Net()
    model.backbone.requires_grad_(False).eval()
    hook.start("learning", every=1)
    train(model, [sgd(model.head.parameters())], 12)
    assert not found(hook)


def test_gradients_of_the_inputs_of_a_model_in_eval_are_no_training(hook):
    """An adversarial example is optimized through a model in `eval()`."""
    model, example = Net().eval(), X.clone().requires_grad_()
    optimizer = torch.optim.SGD([example], lr=0.1)
    hook.start("learning", every=1)
    for _ in range(12):
        optimizer.zero_grad()
        (-cross_entropy(model(example), Y)).backward()
        optimizer.step()
    assert not found(hook)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_training_that_never_makes_a_step(hook, to_none):
    model = Net()
    hook.start("learning", every=1)
    for _ in range(40):
        model.zero_grad(set_to_none=to_none)
        cross_entropy(model(X), Y).backward()
    ((kind, message),) = found(hook)
    assert kind == "no_step"
    assert message.endswith("no optimizer has made a step. Is optimizer.step() called?")
    assert hook.value("learning_finding", "no_step") == 1
    train(model, [sgd(model.parameters())], 2)
    assert hook.value("learning_finding", "no_step") == 0


def test_gradients_may_be_accumulated_for_long_before_the_first_step(hook):
    model = Net()
    hook.start("learning", every=1)
    for _ in range(40):
        cross_entropy(model(X), Y).backward()
    assert not found(hook)


def test_a_step_by_hand_is_one(hook):
    model = Net()
    hook.start("learning", every=1)
    for _ in range(40):
        model.zero_grad()
        cross_entropy(model(X), Y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
    assert not found(hook)


def test_updates_that_only_reach_elements_far_behind_are_updates(hook):
    words = nn.Embedding(100, 64, padding_idx=0)
    hook.start("learning", every=1)
    optimizer = sgd(words.parameters())
    for _ in range(20):
        optimizer.zero_grad()
        words(torch.tensor([0, 90])).square().mean().backward()
        optimizer.step()
    assert not found(hook)


def one_key(model, x):
    """Attention to a single key, whose weight is always 1."""
    scores = (model[0](x) * x).sum(-1, keepdim=True)
    return model[2](scores.softmax(-1) * x)


@pytest.mark.parametrize(
    ("forward", "loss"),
    [
        (one_key, cross_entropy),
        (lambda model, x: model(x)[:, 0].unsqueeze(1), lambda out, y: (out - y).square().mean()),  # all pairs
        (lambda model, x: model(x)[:, :1], lambda out, y: (out - out.squeeze(-1)).square().mean()),  # of outputs
        (lambda model, x: model(x), lambda out, y: (out.softmax(-1) * out.log_softmax(-1)).sum()),  # an entropy
        (lambda model, x: model(x), lambda out, y: cross_entropy(10 * out.sigmoid(), y)),
        (lambda model, x: model(x), lambda out, y: cross_entropy(out.relu().unflatten(-1, (3, 1)).mean(-1), y)),
    ],
)  # fmt: skip
def test_losses_that_look_unusual_and_are_meant(hook, forward, loss):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    hook.start("learning", every=1)
    optimizer = sgd(model.parameters(), 0.01)
    for _ in range(12):
        optimizer.zero_grad()
        loss(forward(model, X), Y).backward()
        optimizer.step()
    assert not found(hook)


@pytest.mark.parametrize("is_in_one_step_of_two", [False, True])
def test_a_loss_that_gets_probabilities(hook, is_in_one_step_of_two):
    model = Net()
    hook.start("learning", every=1)
    optimizer = sgd(model.parameters())
    for step in range(12):
        optimizer.zero_grad()
        is_right = is_in_one_step_of_two and step % 2
        cross_entropy(model(X) if is_right else model(X).softmax(-1)[:, None].squeeze(1), Y).backward()
        optimizer.step()
    assert [kind for kind, _ in found(hook)] == ["loss_input"] * (not is_in_one_step_of_two)


def test_a_loss_that_has_nothing_left_to_learn_is_no_fault(hook):
    hook.start("learning", every=1)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        near, far = model(torch.randn(8, 4)), torch.full((8, 4), 100.0)
        optimizer.zero_grad()
        nn.functional.triplet_margin_loss(near, near.detach(), far).backward()
        optimizer.step()
    assert hook.incidents == []


@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_encoder_that_no_optimizer_has_is_found_though_it_is_a_model_of_its_own(hook, is_frozen):
    hook.start("learning", every=1)
    encoder, decoder = nn.Linear(4, 4), nn.Linear(4, 2)
    encoder.train(not is_frozen)  # a loss that is a model, such as a perceptual one, is in eval()
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        decoder(encoder(torch.randn(8, 4))).square().mean().backward()
        optimizer.step()
    assert [one.kind for one in hook.incidents] == ([] if is_frozen else ["not_optimized"])
