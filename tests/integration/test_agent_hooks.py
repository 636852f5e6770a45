"""Every hook of hookd.api.hookspecs, called by a real model in this process."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import hookd
from hookd import Plugin, hookimpl
from hookd.api import hookspecs
from tests.support.agent import running


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(net: nn.Module, steps: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = net(torch.ones(3, 4)).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class Recorder(Plugin):
    """Records its events; subclasses say which hooks."""

    name = "recorder"

    def __init__(self) -> None:
        self.seen: list = []


def seen_by(plugin: type[Recorder], steps: int = 1, net: nn.Module | None = None, every: int = 1) -> list:
    with running(plugin, options={"every": str(every)} if every > 1 else {}) as agent:
        train(net if net is not None else model(), steps)
        assert agent.state("recorder") == "active", agent.parts.registry.named("recorder").last_error
        return agent.plugin("recorder").seen


def test_every_hook_has_a_test_of_its_name() -> None:
    hooks = set(hookspecs.HOOKS)
    tests = {name[len("test_hook_") :] for name in globals() if name.startswith("test_hook_")}
    assert hooks == tests


def test_hook_configure() -> None:
    class Configured(Recorder):
        @hookimpl
        def configure(self, context):
            self.seen += [context.option("every", 3), context.rank, context.world_size, context.step]

    assert seen_by(Configured) == [3, 0, 1, 1]


def test_hook_succeed() -> None:
    class Succeeding(Recorder):
        @hookimpl
        def succeed(self, predecessor):
            self.seen = [*predecessor.seen, "succeeded"]

    with running(Succeeding) as agent:
        parts, old = agent.parts, agent.parts.registry.named("recorder")
        old.plugin.seen.append("known")
        new = parts.loading.ready(Succeeding(), {}, by_name=True, old=old)
        assert new.plugin.seen == []
        parts.loading.switch(old, new)
        parts.loading.discard(old, new)
        assert agent.plugin("recorder").seen == ["known", "succeeded"]


def test_hook_unconfigure() -> None:
    class Unconfigured(Recorder):
        @hookimpl
        def unconfigure(self):
            self.seen.append("gone")

    assert seen_by(Unconfigured) == ["gone"]


def test_hook_select() -> None:
    class Selecting(Recorder):
        @hookimpl
        def select(self, module):
            self.seen.append(module.name)
            return module.type == "Linear"

        @hookimpl
        def forward(self, module):
            self.seen.append(f"forward {module.name}")

    seen = seen_by(Selecting, steps=2)
    assert sorted(seen[:4]) == ["(root)", "0", "1", "2"]
    assert seen[4:] == ["forward 0", "forward 2"] * 2


def test_hook_forward_pre() -> None:
    class Before(Recorder):
        @hookimpl
        def forward_pre(self, module, inputs, kwargs, recompute):
            self.seen.append((module.name, tuple(inputs[0].shape), kwargs, recompute))

    assert seen_by(Before) == [
        ("(root)", (3, 4), {}, False),
        ("0", (3, 4), {}, False),
        ("1", (3, 8), {}, False),
        ("2", (3, 8), {}, False),
    ]


def test_hook_forward() -> None:
    class After(Recorder):
        @hookimpl
        def forward(self, module, inputs, output, elapsed_ns):
            self.seen.append((module.name, len(inputs), tuple(output.shape), torch.is_grad_enabled()))
            assert elapsed_ns > 0

    assert seen_by(After) == [
        ("0", 1, (3, 8), False),
        ("1", 1, (3, 8), False),
        ("2", 1, (3, 2), False),
        ("(root)", 1, (3, 2), False),
    ]


def test_hook_output_summary() -> None:
    class Statistics(Recorder):
        @hookimpl
        def output_summary(self, summary, module, output):
            self.seen.append((module.name, summary.count, tuple(output.shape), torch.is_grad_enabled()))

    assert seen_by(Statistics) == [
        ("0", 24, (3, 8), False),
        ("1", 24, (3, 8), False),
        ("2", 6, (3, 2), False),
        ("(root)", 6, (3, 2), False),
    ]


def test_hook_forwards() -> None:
    class Several(Recorder):
        @hookimpl
        def forwards(self, calls):
            shapes = [(call.module.name, len(call.inputs), tuple(call.output.shape)) for call in calls]
            self.seen.append((shapes, torch.is_grad_enabled()))

    alone, together = seen_by(Several, steps=2)[-5:-1], seen_by(Several, steps=2)[-1]
    expected = [("0", 1, (3, 8)), ("1", 1, (3, 8)), ("2", 1, (3, 2)), ("(root)", 1, (3, 2))]
    assert alone == [([one], False) for one in expected], "at first it is not known what they make"
    assert together == (expected, False)


class Breaking(nn.Module):
    def __init__(self, output) -> None:
        super().__init__()
        self.output, self.breaks = output, False

    def forward(self, x):
        return self.output(torch.full_like(x, torch.nan) if self.breaks else x)


class Suspecting(Recorder):
    @hookimpl
    def configure(self, context):
        self.context = context

    @hookimpl
    def suspect(self, call):
        is_known = isinstance(call.inputs[0], torch.Tensor) and len(call.before) == 1
        self.seen.append((call.module.name, [one.name for one in call.stack()], is_known))
        assert not torch.is_grad_enabled()

    @hookimpl
    def root_forward(self):
        self.seen.append(self.context.has_seen_all())


class Hearing(Recorder):
    name = "hearing"

    @hookimpl
    def forward(self, output):
        self.seen.append(output)


class MayChange(Plugin):
    name = "maychange"
    mutates = True

    @hookimpl
    def forward_pre(self, inputs):
        """Change nothing."""


ways = pytest.mark.parametrize("beside", [(), (Hearing,), (MayChange,)], ids=["in C", "notified in C", "in a plan"])


@pytest.mark.usefixtures("entry")
@ways
def test_hook_suspect(beside) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Breaking(lambda x: (x, None)), nn.Flatten(0)), nn.Linear(2, 2))
    model[1][1].forward = lambda x: x[0]
    with running(Suspecting, *beside, budget=100.0) as agent:
        for breaks in (False, False, True, False):
            model[1][0].breaks = breaks
            model(torch.ones(2, 2))
        reported = [
            ("1.0", ["(root)", "1", "1.0"], True),
            ("1.1", ["(root)", "1", "1.1"], False),
            ("1", ["(root)", "1"], True),
            ("2", ["(root)", "2"], True),
            ("(root)", ["(root)"], True),
        ]
        assert agent.plugin("recorder").seen == [True, True, *reported, True, True]


@pytest.mark.usefixtures("entry")
@ways
@pytest.mark.parametrize(
    ("output", "in_c", "in_plan"),
    [
        (lambda x: x, True, True),
        (lambda x: x.t(), True, True),
        (lambda x: x.long(), True, True),
        (lambda x: x.new_full((3,), -torch.inf), True, True),
        (lambda x: x[:0], True, True),
        (lambda x: x.half(), True, True),
        (lambda x: x.to_sparse(), False, True),
        (lambda x: x.to(torch.complex64), False, True),
        (lambda x: x.repeat(300, 300), False, False),
        (lambda x: x.repeat(300, 300)[::300], False, True),
        (lambda x: {"x": x}, False, False),
        (lambda x: x.to("meta"), False, False),
        (nn.Parameter, False, False),
    ],
)
def test_what_nobody_could_look_at_is_known(beside, output, in_c, in_plan) -> None:
    model = nn.Sequential(Breaking(output), nn.Identity())
    model[1].forward = lambda _: torch.zeros(1)
    with running(Suspecting, *beside, budget=100.0) as agent:
        for _ in range(3):
            model(torch.ones(2, 3))
        first, *later = agent.plugin("recorder").seen
        assert first is in_plan  # in which it is learnt
        assert later == [in_plan if beside == (MayChange,) else in_c] * 2


def test_hook_root_forward() -> None:
    class Whole(Recorder):
        sampled = ("forward",)

        @hookimpl
        def forward(self, module):
            self.seen.append(module.name)

        @hookimpl
        def root_forward(self, module, inputs, output):
            self.seen.append((module.name, tuple(inputs[0].shape), tuple(output.shape), torch.is_grad_enabled()))

    whole = ("(root)", (3, 4), (3, 2), False)
    assert seen_by(Whole, steps=4, every=3) == [
        *("0", "1", "2", "(root)", whole),
        whole,
        whole,
        *("0", "1", "2", "(root)", whole),
    ]


def test_hook_root_forward_pre() -> None:
    class Before(Recorder):
        sampled = ("forward_pre",)

        @hookimpl
        def forward_pre(self, module):
            self.seen.append(module.name)

        @hookimpl
        def root_forward_pre(self, module):
            self.seen.append((module.name, torch.is_grad_enabled()))

    whole = ("(root)", True)
    seen = seen_by(Before, steps=4, every=3)
    assert [one for one in seen if one != whole] == ["(root)", "0", "1", "2"] * 2
    assert seen.count(whole) == 4
    assert seen[5:7] == [whole, whole]


def test_a_mutating_plugin_can_replace_what_a_model_is_given() -> None:
    class Doubles(Recorder):
        mutates = True

        @hookimpl
        def root_forward_pre(self, inputs):
            return (inputs[0] * 2,)

    net = model()
    with running(Doubles):
        doubled = net(torch.ones(3, 4))
    assert torch.equal(doubled, net(2 * torch.ones(3, 4)))


def test_a_forward_hook_gets_the_versions_that_the_inputs_had_at_entry() -> None:
    class Versions(Recorder):
        @hookimpl
        def forward(self, module, inputs, kwargs, versions):
            if module.depth:
                self.seen.append(versions != hookd.versions(inputs, kwargs))

    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    assert seen_by(Versions, net=net) == [False, True, False]


def test_hook_forward_error() -> None:
    class Failing(Recorder):
        @hookimpl
        def forward_error(self, module, error):
            self.seen.append((module.name, str(error)))

    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("planted")

    net = nn.Sequential(nn.Identity(), Broken())
    with running(Failing) as agent:
        with pytest.raises(ValueError, match="planted"):
            net(torch.ones(1))
        assert agent.plugin("recorder").seen == [("1", "planted"), ("(root)", "planted")]
        assert agent.parts.local.thread.top is None


def test_hook_backward_pre() -> None:
    class GradOut(Recorder):
        @hookimpl
        def backward_pre(self, module, grad_output):
            self.seen.append((module.name, [tuple(g.shape) for g in grad_output]))

    seen = seen_by(GradOut)
    assert sorted(seen) == [("(root)", [(3, 2)]), ("0", [(3, 8)]), ("1", [(3, 8)]), ("2", [(3, 2)])]
    assert [name for name, _ in seen if name != "(root)"] == ["2", "1", "0"]


def test_hook_backward() -> None:
    class GradIn(Recorder):
        @hookimpl
        def backward(self, module, grad_input, grad_output, elapsed_ns):
            self.seen.append((module.name, [None if g is None else tuple(g.shape) for g in grad_input]))
            assert elapsed_ns > 0
            assert grad_output[0] is not None

    seen = seen_by(GradIn)
    assert sorted(seen) == [("(root)", [None]), ("0", [None]), ("1", [(3, 8)]), ("2", [(3, 8)])]


def test_who_wants_the_time_alone_holds_no_gradient() -> None:
    class Times(Recorder):
        @hookimpl
        def backward_pre(self, module):
            pass

        @hookimpl
        def backward(self, module, elapsed_ns):
            self.seen.append(module.name)

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x * 1.0

        @staticmethod
        def backward(_ctx, grad):
            alive.append([ref() is not None for ref in gradients])
            gradients.append(weakref.ref(grad))
            return grad * 1.0

    class Twice(nn.Linear):
        def forward(self, x):
            return Looks.apply(Looks.apply(super().forward(x)))

    alive: list[list[bool]] = []
    gradients: list[weakref.ref[torch.Tensor]] = []
    assert "0" in seen_by(Times, net=nn.Sequential(Twice(4, 2)))
    assert alive == [[], [False]]


def test_hook_param_grad() -> None:
    class ParamGrad(Recorder):
        @hookimpl
        def param_grad(self, module, name, param, grad):
            self.seen.append((module.name, name, grad.shape == param.shape))

    assert sorted(seen_by(ParamGrad)) == [
        ("0", "0.bias", True),
        ("0", "0.weight", True),
        ("2", "2.bias", True),
        ("2", "2.weight", True),
    ]


def test_hook_loss() -> None:
    class Loss(Recorder):
        @hookimpl
        def loss(self, tensors):
            self.seen.append(float(tensors[0]))

    net = model()
    plain = train(model(), 2)
    assert seen_by(Loss, steps=2, net=net) == plain


def test_hook_loss_done() -> None:
    class Done(Recorder):
        @hookimpl
        def loss_done(self, elapsed_ns):
            self.seen.append(elapsed_ns > 0)

    assert seen_by(Done, steps=2) == [True, True]


def test_hook_phase() -> None:
    class Phase(Recorder):
        @hookimpl
        def phase(self, name, now_ns):
            self.seen.append((name, now_ns))

    seen = seen_by(Phase, steps=2)
    names = [name for name, _ in seen]
    assert names == ["forward", "other", "backward", "other", "optimizer", "other"] * 2
    times = [now_ns for _, now_ns in seen]
    assert times == sorted(times)


def test_phase_goes_back_to_what_is_around() -> None:
    class Phase(Recorder):
        @hookimpl
        def phase(self, name):
            self.seen.append(name)

    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=1)

    def closure():
        loss = net(torch.ones(3, 4)).pow(2).sum()
        loss.backward()
        return loss

    with running(Phase) as agent:
        optimizer.step(closure)
        seen = agent.plugin("recorder").seen
    assert seen == ["optimizer", "forward", "optimizer", "backward", "optimizer", "other"]


def test_hook_step_pre() -> None:
    class Before(Recorder):
        @hookimpl
        def step_pre(self, optimizer, step):
            self.seen.append((type(optimizer).__name__, step))

    assert seen_by(Before, steps=3) == [("SGD", 1), ("SGD", 2), ("SGD", 3)]


def test_hook_closure_done() -> None:
    class Closed(Recorder):
        @hookimpl
        def step_pre(self, has_closure):
            self.seen.append(has_closure)

        @hookimpl
        def closure_done(self, optimizer, step):
            self.seen.append((type(optimizer).__name__, step, optimizer.param_groups[0]["params"][0].grad.item()))

    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.LBFGS([weight], lr=0.1, max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    with running(Closed) as agent:
        optimizer.step(closure)
        seen = agent.plugin("recorder").seen
    assert seen[0] is True
    assert seen[1] == ("LBFGS", 1, 2.0)
    assert len(seen) == 1 + 2, "as often as the closure was called"


def test_hook_step_post() -> None:
    class After(Recorder):
        @hookimpl
        def step_post(self, step, elapsed_ns):
            self.seen.append((step, elapsed_ns > 0))

    assert seen_by(After, steps=2) == [(1, True), (2, True)]


def test_hook_step_done() -> None:
    class Done(Recorder):
        @hookimpl
        def step_post(self, step):
            self.seen.append(("post", step))

        @hookimpl
        def step_done(self, step):
            self.seen.append(("done", step))

    assert seen_by(Done, steps=2) == [("post", 1), ("done", 1), ("post", 2), ("done", 2)]


def test_hook_mode() -> None:
    class Mode(Recorder):
        @hookimpl
        def mode(self, module, training):
            self.seen.append((module.name, training))

    net = model()
    with running(Mode) as agent:
        net(torch.ones(1, 4))
        net.eval()
        net.train()
        net[1].eval()
        assert agent.plugin("recorder").seen == [("(root)", False), ("(root)", True), ("1", False)]
        assert not net[1].training


def test_hook_tick() -> None:
    class Tick(Recorder):
        @hookimpl
        def tick(self, now_s):
            self.seen.append(now_s)

    with running(Tick) as agent:
        agent.parts.ticks.tick(1234.5)
        assert 1234.5 in agent.plugin("recorder").seen


def test_a_backward_that_comes_after_the_detach_is_the_trainings_own() -> None:
    class Flowing(Recorder):
        @hookimpl
        def backward(self, module):
            self.seen.append(module.name)

    net = model()
    with running(Flowing) as agent:
        loss, seen = net(torch.ones(3, 4)).sum(), agent.plugin("recorder").seen
    loss.backward()
    assert not seen
    assert all(p.grad is not None for p in net.parameters())


def test_an_error_of_ours_in_a_backward_is_not_the_trainings(monkeypatch) -> None:
    class Flowing(Recorder):
        @hookimpl
        def backward(self, module):
            pass

    def broken(*_: object) -> None:
        raise ValueError("ours")

    monkeypatch.setattr("hookd.target.events.backward._lose", broken)
    with running(Flowing) as agent:
        net = model()
        train(net)
        assert all(p.grad is not None for p in net.parameters())
        assert any("ours" in log["message"] for log in agent.read().logs)
