"""hookd_fingerprint reads what a step computes, changes none of it, and does nothing while no tool reads."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import nn


class Net(nn.Module):
    """Has dropout, a norm with buffers, a validation, and a second call of one layer."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.b(self.drop(self.norm(self.a(x)))))


def train(steps, model=None):
    torch.manual_seed(0)
    random.seed(0)
    model = model or Net()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(16, 4))
    return [value.clone() for value in model.state_dict().values()], torch.rand(1), random.random()


def test_while_no_tool_reads_nothing_is_recorded_and_no_hook_is_called(hook):
    hook.start("fingerprint", every=1)
    train(5)
    assert hook.value("fingerprint_steps") == 0
    assert not hook.listens("fingerprint", "forward")


def test_a_training_that_is_recorded_ends_with_the_same_bits_and_random_numbers(hook):
    plain = train(8)
    hook.start("fingerprint", every=1, buffer=64)
    watched = train(8)
    assert hook.value("fingerprint_steps") == 8
    assert all(map(torch.equal, plain[0], watched[0]))
    assert plain[1:] == watched[1:]
    assert not hook.errors


def test_records_that_nobody_takes_are_let_go(hook):
    hook.start("fingerprint", every=1, buffer=1)
    train(2, nn.Linear(4, 4))
    assert hook.value("fingerprint_steps") == 2
    hook.plugin("fingerprint").room = 100
    train(3, nn.Linear(4, 4))
    assert hook.value("fingerprint_lost") == 1
    assert not hook.listens("fingerprint", "forward")


@pytest.mark.parametrize(
    ("option", "phase"), [("forward", "forward"), ("gradients", "gradients"), ("update", "update")]
)
def test_a_part_that_is_not_wanted_is_not_read(hook, option, phase):
    hook.start("fingerprint", every=1, buffer=64, **{option: "false"})
    train(2)
    assert f'"{phase}"'.encode() not in b"".join(hook.plugin("fingerprint").kept)


def test_only_the_chosen_modules_are_read_beside_the_root(hook):
    hook.start("fingerprint", every=1, buffer=64, modules="b|norm", update="false", gradients="false")
    train(2)
    kept = b"".join(hook.plugin("fingerprint").kept)
    assert b'"norm"' in kept
    assert b'"(root)"' in kept
    assert b'"drop"' not in kept


def test_a_pattern_that_matches_no_module_is_reported_once(hook):
    hook.start("fingerprint", every=1, buffer=64, modules="b|nrom")
    train(25)
    (message,) = [one.message for one in hook.incidents if one.kind == "option"]
    assert message == "fingerprint: modules=nrom matches no module; there is norm"


def test_keys_begin_anew_when_shapes_change_without_end(hook, monkeypatch):
    monkeypatch.setattr("hookd_fingerprint.entries.MOST_KEYS", 20)
    hook.start("fingerprint", every=1, buffer=64)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in range(2, 30):
        model(torch.randn(size, 4)).sum().backward()
        optimizer.step()
    firsts = [
        json.loads(record[4 : 4 + int.from_bytes(record[:4], "little")])["at"]
        for record in hook.plugin("fingerprint").kept
    ]
    assert firsts.count(0) > 3


def test_a_step_with_too_many_calls_is_lost_and_the_next_one_is_whole(hook, monkeypatch):
    monkeypatch.setattr("hookd_fingerprint.records.MOST_BYTES", 4000)
    hook.start("fingerprint", every=1, buffer=64)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for calls in (1, 200, 1):
        for _ in range(calls):
            model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    assert (hook.value("fingerprint_steps"), hook.value("fingerprint_lost")) == (2, 1)


class Odd(nn.Module):
    """Returns a tensor of a layout that has no digest, beside a plain one."""

    def __init__(self, layout):
        super().__init__()
        self.layout, self.a = layout, nn.Linear(4, 4)

    def forward(self, x):
        out = self.a(x)
        odd = torch.nested.nested_tensor([out[0], out[1]]) if self.layout == "nested" else out.detach().to_sparse()
        return out, odd


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["nested", "sparse"])
def test_tensors_without_a_digest_are_counted(hook, layout):
    hook.start("fingerprint", every=1, buffer=64)
    model = Odd(layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(3, 4))[0].sum().backward()
    optimizer.step()
    (record,) = hook.plugin("fingerprint").kept
    assert json.loads(record[4 : 4 + int.from_bytes(record[:4], "little")])["unread"] == 1
    assert not hook.errors


def test_names_longer_than_the_tool_takes_are_shortened_and_stay_apart(hook):
    hook.start("fingerprint", every=1, buffer=64)
    model = nn.Sequential()
    for end in "ab":
        model.add_module("n" * 1500 + end, nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["name"] = "g" * 1500
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    (kept,) = hook.plugin("fingerprint").kept
    keys = json.loads(kept[4 : 4 + int.from_bytes(kept[:4], "little")])["keys"]
    long = {name for _, name, *_ in keys if name.startswith("nn")}
    assert len(long) == 2 + 4, "modules, and their parameters"
    assert max(map(len, long)) == 1000
