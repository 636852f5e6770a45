"""The definition of a step, the number from which steps count, and the state that a detach restores."""

from __future__ import annotations

import gc
import json
import socket
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hookd import Plugin, hookimpl
from hookd.target.boot import bootstrap
from hookd.target.events.manual_updates import BELIEVED
from tests.support.agent import running
from tests.support.processes import PATIENCE_S, wait_until

X = torch.ones(2, 4)


class Steps(Plugin):
    name = "counting"

    def __init__(self) -> None:
        self.seen: list = []

    @hookimpl
    def configure(self, context):
        self.context = context

    @hookimpl
    def step_pre(self, step):
        self.seen.append(step)


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(X).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_adam_tells_how_many_steps_there_were_before() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(7):
        step(model, optimizer)
    with running(Steps) as agent:
        step(model, optimizer)
        step(model, optimizer)
        assert agent.plugin("counting").seen == [8, 9]
        assert agent.plugin("counting").context.is_step_absolute
        assert agent.plugin("counting").context.origin == "step 10"
        assert agent.read().identity["step_offset"] == 7


@pytest.mark.parametrize("longer", [0, 1])
def test_of_two_optimizers_the_one_that_has_stepped_more_tells_it(longer: int) -> None:
    model = nn.Linear(4, 1)
    optimizers = [torch.optim.AdamW([parameter]) for parameter in model.parameters()]
    for _ in range(4):
        step(model, optimizers[longer])
    for _ in range(3):
        step(model, *optimizers)
    with running(Steps) as agent:
        step(model, *optimizers)
        assert agent.read().identity["step_offset"] == 7
        step(model, *optimizers)
        assert agent.plugin("counting").context.origin == "step 10"


def test_sgd_does_not_and_it_is_said() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    with running(Steps) as agent:
        step(model, optimizer)
        assert agent.plugin("counting").context.origin == "step 2 (counted from the attach)"
        assert agent.values("hookd_steps")[()] == 1


def test_two_optimizers_are_one_step() -> None:
    model = nn.Linear(4, 1)
    a, b = (torch.optim.SGD([p], lr=0.1) for p in model.parameters())
    with running(Steps) as agent:
        for _ in range(3):
            step(model, a, b)
        assert agent.values("hookd_steps")[()] == 3


class Recorder(Plugin):
    """Records the hooks at the end of a step, and the step's number."""

    name = "recorder"
    sampled = ("step_pre",)
    every = 2

    def __init__(self) -> None:
        self.seen: list = []

    @hookimpl
    def step_pre(self, step):
        self.seen.append(("pre", step))

    @hookimpl
    def step_post(self, step):
        self.seen.append(("post", step))

    @hookimpl
    def step_done(self, step):
        self.seen.append(("done", step))


def test_all_optimizers_that_step_together_do_so_in_one_step_and_are_sampled_together() -> None:
    model = nn.Linear(4, 1)
    a, b = (torch.optim.SGD([p], lr=0.1) for p in model.parameters())
    with running(Recorder, budget=100.0) as agent:
        step(model, a, b)  # hookd does not know yet that there are two
        seen = agent.plugin("recorder").seen
        for number in range(2, 12):
            seen.clear()
            step(model, a, b)
            looked = [("pre", number), ("post", number)] * 2
            assert seen in ([*looked, ("done", number)], [("post", number), ("post", number), ("done", number)])
        assert agent.values("hookd_steps")[()] == 11


def test_where_one_of_them_does_not_come_the_step_is_over_when_the_next_begins() -> None:
    model = nn.Linear(4, 1)
    a, b = (torch.optim.SGD([p], lr=0.1) for p in model.parameters())
    with running(Recorder) as agent:
        for optimizers in ((a, b), (a, b), (a,), (a,), (a, b)):
            step(model, *optimizers)
        assert [number for what, number in agent.plugin("recorder").seen if what == "done"] == [1, 2, 3, 4, 5]
        assert agent.values("hookd_steps")[()] == 5
        step(model, a)
        agent.parts.steps.finish()
        assert agent.plugin("recorder").seen[-1] == ("done", 6)


def test_an_optimizer_a_parameter_steps_inside_of_the_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with running(Recorder) as agent:
        for _ in range(3):
            model(X).sum().backward()
        seen = agent.plugin("recorder").seen
        assert [number for what, number in seen if what == "done"] == [1, 2, 3]
        assert seen.count(("post", 3)) == 4
        assert agent.values("hookd_steps")[()] == 3


def test_two_that_take_turns_make_one_step_of_the_one_that_steps_most() -> None:
    critic, actor = nn.Linear(4, 1), nn.Linear(4, 4)
    of_critic, of_actor = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (critic, actor))
    with running(Recorder) as agent:
        for _ in range(4):
            for _ in range(3):
                step(critic, of_critic)
            critic(actor(X)).sum().backward()
            of_actor.step()
        assert agent.values("hookd_steps")[()] == 12
        assert [number for what, number in agent.plugin("recorder").seen if what == "done"] == [*range(1, 13)]


def update_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.1)
            p.grad.zero_()


def update_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.sub_(p.grad.data, alpha=0.1)
    model.zero_grad()


def update_and_accumulate_no_further(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data - 0.1 * p.grad
        p.grad = None


@pytest.mark.parametrize("update", [update_in_place, update_data, update_and_accumulate_no_further])
@pytest.mark.parametrize("backwards", [1, 3])
def test_a_step_by_hand_is_one_step_however_many_backwards_it_has(update, backwards) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with running(Recorder) as agent:
        for _ in range(20):
            for _ in range(backwards):
                model(X).sum().backward()
            update(model)
        model(X)
        assert agent.values("hookd_steps")[()] == 20
        assert agent.plugin("recorder").seen == [("done", number) for number in range(BELIEVED, 21)]
        assert agent.values("hookd_step_calls") == {(): 0.0}


def test_gradients_that_are_cleared_after_the_forward_end_the_step_as_well() -> None:
    model = nn.Linear(4, 1)
    with running(Recorder) as agent:
        for _ in range(20):
            loss = model(X).sum()
            model.zero_grad()
            loss.backward()
            for p in model.parameters():
                p.data.sub_(p.grad, alpha=0.1)
        assert agent.values("hookd_steps")[()] == 19


@pytest.mark.parametrize("what", ["loss", "model", "frozen", "replaced"])
def test_steps_by_hand_are_seen_where_the_model_changes(what) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model.requires_grad_(what != "frozen")
    with running(Recorder) as agent:
        model(X)
        model.requires_grad_()
        for number in range(40):
            if what == "model" and number == 20:
                model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
            made = model(X)
            (nn.MSELoss()(made, torch.zeros(2, 1)) if what == "loss" else made.sum()).backward()
            for one in model:
                with torch.no_grad():
                    if what == "replaced":
                        one.weight, one.bias = (nn.Parameter(p - 0.1 * p.grad) for p in (one.weight, one.bias))
                    else:
                        one.weight.sub_(0.1 * one.weight.grad)
        assert 38 <= agent.values("hookd_steps")[()] <= 40


def skip(model: nn.Module) -> None:
    model.zero_grad()


def load(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)
    model.load_state_dict(model.state_dict())


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


@pytest.mark.parametrize("before", [skip, load, clip])
def test_what_is_done_before_an_optimizers_first_step_is_no_step(before) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with running(Recorder) as agent:
        for _ in range(10):
            model(X).sum().backward()
            before(model)
        for _ in range(3):
            step(model, optimizer)
        assert agent.values("hookd_steps")[()] == 3


def test_weights_that_are_loaded_now_and_then_are_no_steps_of_a_server() -> None:
    model = nn.Linear(4, 1)
    with running(Recorder) as agent:
        for _ in range(30):
            for _ in range(3):
                model(X)
            model.load_state_dict(model.state_dict())
        assert (agent.values("hookd_steps"), agent.values("hookd_step_calls")) == ({(): 0.0}, {(): 89.0})


def test_a_forward_in_another_thread_closes_no_step() -> None:
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    a, b = (torch.optim.SGD([p], lr=0.1) for p in model.parameters())
    with running(Recorder) as agent:
        for _ in range(3):
            model(X).sum().backward()
            a.step()
            beside = threading.Thread(target=other, args=(X,))
            beside.start()
            beside.join()
            b.step()
        assert agent.plugin("recorder").seen[-3:] == [("post", 3), ("post", 3), ("done", 3)]
        assert agent.values("hookd_steps")[()] == 3


def test_an_interrupt_at_the_end_of_a_step_does_not_end_it_twice() -> None:
    class Interrupted(Plugin):
        name = "zz"

        @hookimpl(trylast=True)
        def step_done(self, step):
            if step == 2:
                raise KeyboardInterrupt  # as torch's own handler would: the exception is the training's

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with running(Recorder, Interrupted) as agent:
        for _ in range(4):
            step(model, optimizer)
        assert [number for what, number in agent.plugin("recorder").seen if what == "done"] == [1, 2, 3, 4]


def test_optimizers_that_are_made_anew_just_before_their_step_make_steps() -> None:
    model = nn.Linear(4, 1)
    with running(Recorder) as agent:
        for _ in range(20):
            for parameter in model.parameters():
                model(X).sum().backward()
                optimizer = torch.optim.SGD([parameter], lr=0.1)
                optimizer.step()
        assert agent.values("hookd_steps")[()] >= 19


def test_a_batch_that_is_accumulated_when_hookd_comes_is_no_step_before_its_optimizer() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with running(Recorder) as agent:
        for _ in range(8):
            model(X).sum().backward()
        assert agent.values("hookd_steps")[()] == 0
        optimizer.step()
        assert agent.values("hookd_steps")[()] == 1


def test_where_a_hundred_backwards_have_made_no_step_each_does() -> None:
    model = nn.Linear(4, 1)
    with running(Recorder) as agent:
        for _ in range(110):
            model(X).sum().backward()
        assert agent.values("hookd_steps")[()] == 9


def test_a_step_by_gradients_of_torch_autograd_grad_is_one_step() -> None:
    model = nn.Linear(4, 1)
    with running(Recorder) as agent:
        for _ in range(20):
            gradients = torch.autograd.grad(model(X).sum(), list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p.sub_(g, alpha=0.1)
        agent.parts.steps.finish()
        assert agent.values("hookd_steps")[()] == 20


def test_where_nothing_is_trained_calls_of_the_model_are_turns() -> None:
    class Looks(Plugin):
        name = "looks"
        sampled = ("forward",)
        every = 4

        def __init__(self) -> None:
            self.seen: list = []

        @hookimpl
        def forward(self, module):
            self.seen.append(module.name)

    model, criterion = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), nn.MSELoss()
    with running(Looks) as agent:
        with torch.no_grad():
            for _ in range(12):
                criterion(model(X), torch.ones(2, 1))
        assert agent.plugin("looks").seen.count("(root)") == 3, "one in four"
        assert (agent.values("hookd_steps"), agent.values("hookd_step_calls")) == ({(): 0.0}, {(): 11.0})
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert (agent.values("hookd_steps"), agent.values("hookd_step_calls")) == ({(): 1.0}, {(): 12.0})


def test_models_whose_weights_are_swapped_moved_or_computed_take_no_steps_by_hand() -> None:
    model = nn.Linear(4, 1)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with running(Recorder) as agent:
        for _ in range(4):
            model(X)
            torch.func.functional_call(model, weights, (X,))
            torch.func.functional_call(model, {name: w * 2 for name, w in weights.items()}, (X,))
            other = nn.Parameter(model.weight.detach().clone())
            torch.utils.swap_tensors(model.weight, other)
        assert agent.values("hookd_steps")[()] == 0


def test_a_subclass_that_calls_super_is_one_step() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = nn.Linear(4, 1)
    optimizer = Mine(model.parameters(), lr=0.1)
    with running(Steps) as agent:
        step(model, optimizer)
        step(model, optimizer)
        assert agent.plugin("counting").seen == [1, 2]


def test_lbfgs_is_one_step_however_often_it_evaluates() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = model(X).pow(2).sum()
        loss.backward()
        return loss

    with running(Steps) as agent:
        optimizer.step(closure)
        optimizer.step(closure)
        assert agent.plugin("counting").seen == [1, 2]


def test_a_step_that_raised_does_not_stop_the_counting() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        raise KeyError("planted")

    with running(Steps) as agent:
        step(model, optimizer)
        with pytest.raises(KeyError):
            optimizer.step(closure)
        step(model, optimizer)
        assert agent.plugin("counting").seen == [1, 2, 2]
        assert agent.values("hookd_steps")[()] == 2


def test_an_optimizer_made_anew_goes_on_counting() -> None:
    model = nn.Linear(4, 1)
    with running(Steps) as agent:
        for _ in range(3):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(5):
                step(model, optimizer)
            del optimizer
            gc.collect()
        assert agent.values("hookd_steps")[()] == 15


class Gradients(Plugin):
    name = "gradients"

    def __init__(self) -> None:
        self.seen: list = []

    @hookimpl
    def backward(self, module, grad_input, grad_output):
        self.seen.append(module.name)


def test_a_sparse_leaf_as_an_input_is_no_trouble() -> None:
    class Taking(nn.Module):
        def forward(self, x):
            return x.to_dense().sum()

    with running(Gradients) as agent:
        Taking()(torch.eye(3).to_sparse().requires_grad_()).backward()
        assert agent.plugin("gradients").seen == ["#Taking.(root)"]
        assert agent.read().logs == []


def test_an_output_that_is_dropped_is_not_kept_alive_by_its_sister() -> None:
    class Two(nn.Module):
        def forward(self, x):
            return {"loss": x.sum(), "picture": (x * 2).exp()}

    x = torch.ones(1000, requires_grad=True)
    with running(Gradients):
        out = Two()(x)
        saved = weakref.ref(out["picture"].grad_fn._saved_result)
        kept = out["loss"]
        del out
        gc.collect()
        assert saved() is None
        kept.backward()


class Calls(Plugin):
    name = "called"

    def __init__(self) -> None:
        self.seen: list = []

    @hookimpl
    def forward(self, module):
        self.seen.append(module.name)


class Recomputes(Plugin):
    name = "recomputed"

    def __init__(self) -> None:
        self.seen: list = []

    @hookimpl
    def forward(self, module, recompute):
        self.seen.append(recompute)


def test_a_recompute_is_not_counted_twice() -> None:
    class Net(nn.Module):
        def __init__(self, *, reentrant: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1)
            self.reentrant = reentrant

        def forward(self, x):
            return self.b(checkpoint(self.a, x, use_reentrant=self.reentrant))

    for reentrant in (True, False):
        with running(Calls, Recomputes) as agent:
            Net(reentrant=reentrant)(X.clone().requires_grad_()).sum().backward()
            assert agent.plugin("called").seen == ["a.0", "a.1", "a", "b", "(root)"]
            recomputed = agent.plugin("recomputed").seen
            assert recomputed[:5] == [False] * 5
            assert recomputed[5:]
            assert all(recomputed[5:])
            assert agent.parts.local.thread.top is None


@pytest.mark.usefixtures("python_patch")
def test_a_patch_on_top_of_ours_is_left_alone() -> None:
    original = nn.Module.__dict__["__call__"]
    with running(Calls):
        ours = nn.Module.__dict__["__call__"]

        def theirs(self, *args, **kwargs):
            return ours(self, *args, **kwargs)

        nn.Module.__call__ = theirs
        try:
            result = bootstrap.stop()
            assert result["restored"] == "pass-through"
            assert result["residue"]
            assert nn.Identity()(X) is X
        finally:
            nn.Module.__call__ = original


@pytest.mark.usefixtures("entry")
def test_a_patch_on_top_is_no_hindrance_to_the_entry(monkeypatch) -> None:
    original = nn.Module.__dict__["__call__"]
    with running(Calls) as agent:

        def theirs(self, *args, **kwargs):
            return original(self, *args, **kwargs)

        monkeypatch.setattr(nn.Module, "__call__", theirs)
        nn.Identity()(X)
        assert agent.plugin("called").seen[-1] == "#Identity.(root)"
        assert bootstrap.stop() == {"restored": "identity", "residue": []}
        assert nn.Identity()(X) is X


@pytest.mark.usefixtures("either_way")
def test_an_exception_of_the_training_leaves_the_stack_right() -> None:
    class Broken(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    model = nn.Sequential(nn.Identity(), Broken())
    with running(Calls) as agent:
        try:
            model(X)
        except KeyboardInterrupt:
            assert agent.parts.local.thread.top is None
        nn.Identity()(X)
        assert agent.plugin("called").seen[-1] == "#Identity.(root)"


def ask(path: str, *requests: object) -> list[dict]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect("\0" + path[1:] if path.startswith("@") else path)
        file = sock.makefile("rwb")
        answers = []
        for request in requests:
            file.write((request if isinstance(request, str) else json.dumps(request)).encode() + b"\n")
            file.flush()
            answers.append(json.loads(file.readline()))
        return answers


def test_the_control_socket_answers_and_survives_nonsense() -> None:
    with running(Calls) as agent:
        path = agent.read().identity["control"]
        answers = ask(
            path, "nonsense", "[1]", {"op": "fly"}, {"op": "unload", "name": "x"}, "[" * 100_000, {"op": "status"}
        )
        assert [a["ok"] for a in answers] == [False] * 5 + [True]
        assert answers[3]["reason"] == "no-such-plugin"
        assert answers[5]["plugins"][0]["name"] == "called"
        assert answers[5]["version"]


def test_an_agent_whose_leases_are_gone_detaches_itself() -> None:
    original = nn.Module.__dict__["__call__"]
    bootstrap.start({"method": "attach", "plugins": [], "lease_s": 1.0})
    path = bootstrap._agent._control.path
    assert ask(path, {"op": "lease", "seconds": 0.1})[0]["leases"] == 1
    wait_until(lambda: bootstrap._agent is None, what="the detach")
    assert nn.Module.__dict__["__call__"] is original


@pytest.mark.usefixtures("python_patch")
def test_step_that_ends_after_the_detach_installs_nothing() -> None:
    from torch._dynamo import utils
    from torch.utils.data import DataLoader

    class DetachedMeanwhile(Plugin):
        name = "meanwhile"

        @hookimpl
        def step_post(self, step):
            other = threading.Thread(target=bootstrap._agent.parts.arming.disarm)
            other.start()
            other.join(PATIENCE_S)

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = utils.unpatched_nn_module_call, vars(DataLoader)["__iter__"], vars(nn.Module)["__call__"]
    with running(DetachedMeanwhile):
        assert utils.unpatched_nn_module_call is not before[0], "nothing was installed: the test proves nothing"
        assert vars(DataLoader)["__iter__"] is not before[1]
        step(model, optimizer)
        assert (utils.unpatched_nn_module_call, vars(DataLoader)["__iter__"], vars(nn.Module)["__call__"]) == before
