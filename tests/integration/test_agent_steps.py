"""What counts as a step, from where it counts, and what a detach puts back."""

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
from hookd.agent import bootstrap
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
        assert agent.plugin("gradients").seen == ["(root)"]
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
            assert agent.session.local.thread.top is None


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
        assert agent.plugin("called").seen[-1] == "(root)"
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
            assert agent.session.local.thread.top is None
        nn.Identity()(X)
        assert agent.plugin("called").seen[-1] == "#2.(root)"


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
            other = threading.Thread(target=bootstrap._agent._session.disarm)
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
