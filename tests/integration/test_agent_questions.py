"""Questions of a person to a live process: a real agent in this process, asked over its control socket."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import types
import weakref

import pytest
import torch
from torch import nn

from hookd.errors import ControlError
from hookd.target.boot import spawn
from hookd.target.remote.control import Connection
from hookd.target.remote.requests import Queries
from hookd.tool.attach import Control
from hookd.tool.attach.modules import snapshot
from hookd.tool.attach.stack import stack as look_at_stacks
from hookd.tool.daemon.evaluate import evaluate
from hookd.tool.linux.owner import user_name
from tests.support import emulated
from tests.support.agent import running
from tests.support.processes import wait_until

BY = {"uid": 7, "pid": 8}


class Touchy(torch.Tensor):
    """A tensor that raises when it is asked for anything."""

    @classmethod
    def __torch_function__(cls, *_):
        raise AssertionError("asked")

    @property
    def dtype(self):
        raise AssertionError("asked for its dtype")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.tied, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.tied.weight = self.first.weight
        self.tied.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(2, 3, dtype=torch.bool), persistent=False)
        self.layers = nn.ModuleList([nn.Dropout(0.0)])
        self.lazy = nn.LazyLinear(3)

    def forward(self, x):
        return self.norm(self.layers[0](self.tied(self.first(x))))

    def __bool__(self):
        raise AssertionError("nobody asks a model whether it is true")

    __hash__ = None


def user_hook(*_):
    return None


def train(model, optimizer):
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()


def trained():
    model = Net()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    train(model, optimizer)
    return model, optimizer


def row(found, name):
    return next(module for module in found["modules"] if module["name"] == name)


def test_a_snapshot_tells_modules_tensors_hooks_and_what_is_seen():
    with running("timing"):
        model = Net()
        model.first.register_forward_hook(user_hook)
        model.first.weight.register_hook(user_hook)
        optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
        for _ in range(2):
            train(model, optimizer)
        model.tied.eval()
        found = snapshot(os.getpid())
    names = [module["name"] for module in found["modules"]]
    assert names == ["(root)", "first", "tied", "unused", "norm", "layers", "layers.0", "lazy"]
    root, first, tied = (row(found, name) for name in names[:3])
    assert (root["class"], root["home"]) == ("Net", Net.__module__)
    (mask,) = root["buffers"]
    assert (mask["shape"], mask["dtype"], mask["persistent"], mask["bytes"]) == ([2, 3], "bool", False, 6)
    assert first["parameters"][0] == {
        "name": "weight", "dtype": "float32", "device": "cpu", "requires_grad": True, "shape": [4, 4], "elements": 16,
        "bytes": 64,
    }  # fmt: skip
    assert [(one["kind"], one["function"].rpartition(":")[2], one.get("on")) for one in first["hooks"]] == [
        ("forward", "user_hook", None),
        ("grad", "user_hook", "weight"),
    ]
    assert tied["parameters"][0] == {"name": "weight", "same_as": "first.weight"}
    assert (first["seen"], first["plugins"], first["training"]) == ("observed", ["timing"], True)
    assert (tied["training"], row(found, "unused")["seen"]) == (False, "never_called")
    assert (row(found, "layers")["seen"], row(found, "layers.0")["class"]) == ("container", "Dropout")
    totals = found["totals"]
    assert totals["modules"] == 8
    assert totals["parameters"] == 16 + 4 + 4 + 10 + 8
    assert totals["trainable"] == totals["parameters"] - 4
    assert totals["buffers"] == 6 + 4 + 4 + 1
    assert totals["unknown"] == 2  # the lazy one's weight and bias
    assert {(one["dtype"], one["kind"]) for one in totals["by"]} == {
        ("float32", "parameters"), ("float32", "buffers"), ("int64", "buffers"), ("bool", "buffers")
    }  # fmt: skip


def test_a_tensor_of_a_class_of_its_own_is_described_without_asking_it():
    with running("timing"):
        model = nn.Sequential(nn.Linear(2, 2))
        model(torch.randn(1, 2))
        model[0]._buffers["touchy"] = torch.zeros(5, dtype=torch.float16).as_subclass(Touchy)
        found = snapshot(os.getpid())
        (reported,) = row(found, "0")["buffers"]
    assert (reported["class"], reported["dtype"], reported["shape"], reported["bytes"]) == (
        "Touchy",
        "float16",
        [5],
        10,
    )


def test_the_inside_of_a_wrapper_has_the_wrappers_name_and_a_second_root_its_own():
    with running("timing"):
        models = nn.DataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)
        for model in models:
            model(torch.randn(1, 2))
        found = snapshot(os.getpid())
        reported = [(module["name"], module["class"], module["wrapped"]) for module in found["modules"]]
    assert reported == [
        ("(root)", "DataParallel", False),
        ("(root)", "Linear", True),
        ("#Linear.(root)", "Linear", False),
    ]


def test_of_many_tensors_of_one_module_the_rest_is_counted(monkeypatch):
    monkeypatch.setattr("hookd.target.modeltree.snapshot.MOST_TENSORS", 2)
    with running("timing"):
        model = nn.BatchNorm1d(2)
        model.third, model.fourth = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        model(torch.randn(3, 2))
        reported = row(snapshot(os.getpid()), "(root)")
    assert (len(reported["parameters"]), len(reported["buffers"])) == (2, 2)
    assert reported["left_out"] == 2 + 1


def test_a_large_model_comes_in_portions_that_keep_nothing_of_it_alive():
    with running("timing"):
        model = nn.Sequential(*(nn.Sequential(nn.Identity()) for _ in range(3000)))
        model(torch.zeros(1))
        found = snapshot(os.getpid())
        assert found["totals"]["modules"] == 6001
        states = {module["seen"] for module in found["modules"]}
        assert "left_out" in states, "it has more modules than are observed"
        assert snapshot(os.getpid(), most=10)["is_cut"]
        with Control.connect(os.getpid()) as control:
            portion = control.request("snapshot", begin=True)
            assert not portion["is_over"]
            assert 0 < len(portion["modules"]) <= 256
            gone = weakref.ref(model[-1])
            del model
            gc.collect()
            assert gone() is None
            portions = iter(lambda: control.request("snapshot"), None)
            assert next(one for one in portions if one["is_over"])["modules"] == []


def test_an_expression_sees_models_optimizers_and_the_step_and_leaves_its_trace(caplog):
    caplog.set_level(logging.INFO)
    with running("timing") as agent:
        model, optimizer = trained()
        answer = evaluate(os.getpid(), {"expression": " model.tied.bias.numel() + len(optimizers) "}, BY)
        assert (answer["state"], answer["result"], answer["value"], answer["type"]) == ("done", "5", 5, "int")
        assert evaluate(os.getpid(), {"expression": "step"}, BY)["value"] == 2
        assert evaluate(os.getpid(), {"expression": "torch.is_grad_enabled()"}, BY)["value"] is False
        calls = agent.values("hookd_timing_forward_calls")["(root)",]
        assert evaluate(os.getpid(), {"expression": "models[0](torch.ones(2, 4)).shape"}, BY)["state"] == "done"
        assert agent.values("hookd_timing_forward_calls")["(root)",] == calls, "none of the training's calls"
        wait_until(lambda: len(agent.read().incidents) == 4, what="the incidents")
        incident = agent.read().incidents[0]
        begun = [line["message"] for line in agent.read().logs if "eval begins" in line["message"]]
        del model, optimizer
    assert (incident["kind"], incident["by"], incident["outcome"]) == ("eval", BY, "done: int")
    assert "model.tied.bias.numel()" in incident["message"]
    assert len(begun) == 4
    assert "user 7" in begun[0]
    lines = [record.getMessage() for record in caplog.records]
    assert any(f"begins, for user {user_name(7)} (process 8):  model.tied.bias" in line for line in lines)
    assert any("done int" in line for line in lines)


def test_an_expression_that_raises_tells_where_without_frames_of_hookd():
    with running("timing"):
        for text, kind in (("[1][5]", "IndexError"), ("1 +", "SyntaxError"), ("exit(3)", "SystemExit")):
            answer = evaluate(os.getpid(), {"expression": text}, BY)
            assert (answer["state"], answer["type"]) == ("raised", kind)
            assert "hookd/" not in answer["traceback"]
        assert "line 1, in <module>" in evaluate(os.getpid(), {"expression": "1 / 0"}, BY)["traceback"]


def test_results_are_bounded():
    with running("timing"):
        for text in ("list(range(10**6))", "'x' * 10**6", "[[[['y' * 1000] * 999] * 999] * 999] * 999"):
            answer = evaluate(os.getpid(), {"expression": text}, BY)
            assert 1000 < len(answer["result"]) <= 64 << 10
            assert "value" not in answer
        assert evaluate(os.getpid(), {"expression": "'x' * 1000"}, BY)["value"] == "x" * 1000


def test_a_loop_is_interrupted_and_what_cannot_be_is_given_up_and_reported():
    ours, theirs = os.pipe()
    with running("timing") as agent:
        answer = evaluate(os.getpid(), {"expression": "all(True for _ in iter(int, 1))", "timeout_s": 0.2}, BY)
        assert answer["state"] == "interrupted"

        before = spawn.OWN.copy()
        gate = types.SimpleNamespace(wait=functools.partial(os.read, ours, 1))
        agent.parts.steps.optimizers = lambda: [gate]  # reachable only from an expression of this test
        try:
            stuck = {"expression": "optimizers[0].wait()", "timeout_s": 0.1}
            with Control.connect(os.getpid()) as control:
                for _ in range(3):
                    control.request("eval", expression=stuck["expression"], limit_s=0.1, by=BY)
            answer = evaluate(os.getpid(), stuck, BY)
            assert answer["state"] == "running"
            assert "<eval>:1" in answer["frames"][0]
            with pytest.raises(ControlError) as caught:
                evaluate(os.getpid(), {"expression": "1"}, BY)
            assert caught.value.reason == "busy"
            assert any("eval" in one for one in agent.agent._queries.residue())
            with Control.connect(os.getpid()) as control:
                assert control.request("status")["ok"], "its own thread is free all the while"
        finally:
            os.write(theirs, b"....")
        wait_until(lambda: evaluate_or_none("1"), what="room again")
        wait_until(lambda: not spawn.OWN - before, what="the end of all that were stuck")
    os.close(ours)
    os.close(theirs)


AFTER = """
import os, sys
import tests.integration.test_agent_questions as tests
with tests.running():
    for expression in ("1", "1 / 0", "all(True for _ in iter(int, 1))"):
        print(tests.evaluate(os.getpid(), {"expression": expression, "timeout_s": 0.2}, tests.BY)["state"], flush=True)
calls = []
sys.settrace(lambda frame, *_: calls.append(frame.f_code.co_name))
tests.trained()
sys.settrace(None)
print(calls[0])
"""


@emulated.lacks("proc")
def test_a_debugger_finds_the_interpreter_as_it_was_after_an_evaluation():
    """A flag of the interpreter that stays set slows each call down, and CPython 3.11 then never begins a traced one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", AFTER], env=environment, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["done", "raised", "interrupted", "trained"], done.stderr


def evaluate_or_none(expression):
    try:
        return evaluate(os.getpid(), {"expression": expression}, BY)
    except ControlError:
        return None


def test_what_is_asked_is_checked():
    with running("timing"), Control.connect(os.getpid()) as control:
        for wrong in (
            {},
            {"expression": 1, "limit_s": 1},
            {"expression": "1", "limit_s": 0},
            {"expression": "1" * 99999, "limit_s": 1},
        ):
            with pytest.raises(ControlError) as caught:
                control.request("eval", **wrong)
            assert caught.value.reason == "bad-request"
        with pytest.raises(ControlError):
            control.request("eval_look", number=10**6)


def test_who_has_gone_meanwhile_has_nothing_evaluated():
    ours, theirs = socket.socketpair()
    with running("timing") as agent, ours:
        questions = Queries(agent.parts.trees, agent.parts.evaluations, lambda: Connection(ours, 1, 2))
        with theirs:
            assert questions.operations["eval"]({"expression": "1", "limit_s": 1})["number"]
        with pytest.raises(ControlError):
            questions.operations["eval"]({"expression": "1", "limit_s": 1})


def test_the_stacks_of_all_threads_are_reported_but_for_hookds_own():
    leave, inside = threading.Event(), threading.Event()

    def waits_for_the_test():
        inside.set()
        leave.wait()

    with running("timing"):
        model, optimizer = trained()
        helper = threading.Thread(target=waits_for_the_test, name="a \x1b helper")
        helper.start()
        inside.wait()
        try:
            found = look_at_stacks(os.getpid())
        finally:
            leave.set()
            helper.join()
        del model, optimizer
    main, *others = found["threads"]
    assert main["tid"] == os.getpid()
    assert (main["beat"]["step"], main["beat"]["moves"]) == (2, False)
    assert any("test_the_stacks_of_all" in frame["function"] for frame in main["frames"])
    waiting = next(thread for thread in others if thread["tid"] == helper.native_id)
    functions = [frame["function"].rpartition(".")[2] for frame in waiting["frames"]]
    assert functions.index("wait") < functions.index("waits_for_the_test"), "innermost first"
    assert not [frame for one in found["threads"] for frame in one["frames"] if "Control._serve" in frame["function"]]
    assert found["ways"]["python"]["by"] == "agent"
    assert found["last_step_s"] < 60
    assert list(itertools.islice(found["ways"], 1)) == ["page"]


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_agent_that_was_asked_to_stay_stays_though_its_starter_is_gone(is_kept):
    with running() as agent, Control.connect(os.getpid()) as control:
        if is_kept:
            control.request("keep")
        agent.agent.orphan()
        assert (agent.agent._control._stay_until is None) == is_kept
        assert agent.read().identity["keep"] is is_kept
