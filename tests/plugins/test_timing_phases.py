"""Every moment of a step belongs to one phase: real loops, with a clock that moves only where they work."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from tests.support.clock import Clock

PHASES = ("data", "forward", "backward", "optimizer", "inference", "other")
LONG_S = 0.01
CLOCK = Clock()


def work(seconds=LONG_S):
    CLOCK.advance(seconds)


@pytest.fixture
def moved(hook):
    """Make the target use CLOCK as its clock."""
    hook.pretend(clock=CLOCK)


class Work(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        work()
        return x * 1.0

    @staticmethod
    def backward(_ctx, grad):
        work()
        return grad


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return Work.apply(self.fc(x))


class Checkpointed(Slow):
    def forward(self, x):
        return checkpoint(lambda x: self.fc(super(Checkpointed, self).forward(x)), x, use_reentrant=False)


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        work()
        return super().step(closure)


class Samples(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, at):
        work(LONG_S / 2)
        return torch.full((4,), float(at))


def loss_of(model, x=None):
    return model(torch.randn(2, 4) if x is None else x).square().mean()


def plain(model):
    optimizer = SlowSGD(model.parameters(), lr=0.01)
    while True:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        yield {"forward": 1, "backward": 1, "optimizer": 1}


def checkpointing(_model):
    for least in plain(Checkpointed()):
        yield {**least, "backward": 2}


def accumulation(model):
    optimizer = SlowSGD(model.parameters(), lr=0.01)
    while True:
        optimizer.zero_grad()
        for _ in range(3):
            loss_of(model).backward()
        work()
        optimizer.step()
        yield {"forward": 3, "backward": 3, "optimizer": 1, "other": 1}


def several_backwards(model):
    optimizer = SlowSGD(model.parameters(), lr=0.01)
    while True:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        yield {"forward": 1, "backward": 2, "optimizer": 1}


def lbfgs(model):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    while True:
        optimizer.step(closure)
        yield {"forward": 2, "backward": 2}


def evaluation_between(model):
    for least in plain(model):
        with torch.no_grad():
            loss_of(model.eval())
        model.train()
        yield {**least, "inference": 1}


def grad_scaler(model):
    optimizer = SlowSGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in itertools.count():
        optimizer.zero_grad()
        x = torch.full((2, 4), torch.inf) if step % 2 else None  # an overflow: the optimizer is not called
        scaler.scale(loss_of(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 2:
            continue
        yield {"forward": 2 if step else 1, "backward": 2 if step else 1, "optimizer": 1}


def data_loader(model):
    optimizer = SlowSGD(model.parameters(), lr=0.01)
    for x in DataLoader(Samples(), batch_size=2):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        yield {"data": 1, "forward": 1, "backward": 1, "optimizer": 1}


def two_optimizers(model):
    other = Slow()
    steps = plain(model), plain(other)
    while True:
        for one in steps:
            next(one)
        yield {"forward": 2, "backward": 2, "optimizer": 2}


def errors_on_the_way(model):
    def fails(_module, _args, _output):
        raise ValueError

    for least in plain(model):
        handle = model.fc.register_forward_hook(fails)
        with pytest.raises(ValueError):
            model(torch.randn(2, 4))
        handle.remove()
        yield least


def all_of_it(model):
    other = Slow()
    plain_one = SlowSGD(other.parameters(), lr=0.01)
    lbfgs_one = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    loader = DataLoader(Samples(), batch_size=2)

    def closure():
        lbfgs_one.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    batches = iter(loader)
    while True:
        for _ in range(2):
            loss_of(other, next(batches)).backward()
        work()
        plain_one.step()
        plain_one.zero_grad()
        with torch.no_grad():
            for _, x in zip(range(2), DataLoader(Samples(), batch_size=1), strict=False):
                model(x)
        lbfgs_one.step(closure)
        # The batch between the two calls without a backward belongs to inference, the one before them does not.
        yield {"data": 2.5, "forward": 4, "backward": 4, "optimizer": 1, "inference": 2.5, "other": 1}


LOOPS = (plain, checkpointing, accumulation, several_backwards, lbfgs, evaluation_between, grad_scaler, data_loader,
         two_optimizers, errors_on_the_way, all_of_it)  # fmt: skip


@pytest.mark.usefixtures("moved")
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_phases_add_up_to_the_wall_time_of_the_steps(hook, loop):
    ends = []
    hook.start("timing")
    steps = loop(Slow())
    handle = register_optimizer_step_post_hook(lambda *_: ends.append(CLOCK.ns / 1e9))
    seen = []
    for _ in range(8):
        least = next(steps)
        seen.append((ends[-1], {phase: hook.value("timing_phase_seconds", phase) for phase in PHASES}))
    handle.remove()
    for (began, before), (ended, after) in itertools.pairwise(seen):
        phases = {phase: after[phase] - before[phase] for phase in PHASES}
        whole = sum(phases.values())
        assert whole == pytest.approx(ended - began), phases
        for phase, times in least.items():
            assert phases[phase] >= times * LONG_S * 0.99, (phase, phases)
        for phase in PHASES:  # and no phase contains time of another
            others = sum(times for other, times in least.items() if other != phase)
            assert phases[phase] <= whole - others * LONG_S * 0.99, (phase, phases)


@pytest.mark.usefixtures("moved")
def test_backwards_in_threads_that_end_before_the_step_are_counted(hook):
    hook.start("timing")
    model = Slow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        thread = threading.Thread(target=lambda: loss_of(model).backward())
        thread.start()
        thread.join()
        optimizer.step()
    for phase in ("forward", "backward"):
        assert hook.value("timing_phase_seconds", phase) == pytest.approx(5 * LONG_S)


class Loaded(Samples):
    """Takes real time: a worker is another process, in which no clock of this one moves."""

    def __getitem__(self, at):
        time.sleep(LONG_S / 2)
        return super().__getitem__(at)


def test_data_that_workers_load_is_waited_for(hook):
    hook.start("timing")
    optimizer = torch.optim.SGD((model := Slow()).parameters(), lr=0.01)
    began = time.perf_counter()
    for x in DataLoader(Loaded(), batch_size=100, sampler=range(200), num_workers=1):
        loss_of(model, x).backward()
        optimizer.step()
    wall_s = time.perf_counter() - began
    waited_s = hook.value("timing_phase_seconds", "data")
    assert 100 * LONG_S / 2 <= waited_s <= wall_s
    assert waited_s > hook.value("timing_phase_seconds", "other")


@pytest.mark.usefixtures("moved")
def test_module_that_makes_data_is_no_forward(hook):
    class Transformed(Samples):
        transform = Slow()

        def __getitem__(self, at):
            return self.transform(super().__getitem__(at)).detach()

    hook.start("timing")
    optimizer = torch.optim.SGD((model := nn.Linear(4, 1)).parameters(), lr=0.01)
    for x in DataLoader(Transformed(), batch_size=2, sampler=range(6)):
        loss_of(model, x).backward()
        optimizer.step()
    assert hook.value("timing_phase_seconds", "data") == pytest.approx(6 * 1.5 * LONG_S)
    assert hook.value("timing_phase_seconds", "forward") == 0


@pytest.mark.usefixtures("moved")
def test_iteration_under_way_is_seen_and_left_as_it_was(hook):
    from torch.utils.data import dataloader

    methods = [(DataLoader, "__iter__"), (dataloader._BaseDataLoaderIter, "__next__")]
    before = [vars(owner)[name] for owner, name in methods]
    batches = iter(DataLoader(Samples(), batch_size=2))
    next(batches)
    hook.start("timing")
    optimizer = torch.optim.SGD((model := nn.Linear(4, 1)).parameters(), lr=0.01)
    for x in itertools.islice(batches, 3):
        loss_of(model, x).backward()
        optimizer.step()
    assert hook.value("timing_phase_seconds", "data") >= 2 * LONG_S
    hook.stop()
    assert [vars(owner)[name] for owner, name in methods] == before
    next(batches)
