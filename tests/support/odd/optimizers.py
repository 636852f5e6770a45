"""Optimizers, scalers, schedulers and loaders with code of their own."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from tests.support.evidence import ran
from tests.support.odd.table import batch, odd, stepping


def layers():
    """Make a small model."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def trained_by(kind, **options):
    """Train a small model with an optimizer of a class."""
    model = layers()
    optimizer = kind(model.parameters(), lr=0.05, **options)
    return stepping(model, lambda number: model(batch(number, 2, 4)).square().mean(), optimizer)


class Groups(torch.optim.SGD):
    """Notes each access to its groups and to its state."""

    @property
    def param_groups(self):
        ran("param_groups")
        return self.__dict__["its_groups"]

    @param_groups.setter
    def param_groups(self, groups):
        self.__dict__["its_groups"] = groups

    @property
    def state(self):
        ran("state")
        return self.__dict__["its_state"]

    @state.setter
    def state(self, state):
        self.__dict__["its_state"] = state


@odd
def groups_that_are_a_property():
    return trained_by(Groups, momentum=0.9)


class Lookup(torch.optim.SGD):
    """Notes lookups of missing attributes."""

    def __getattr__(self, name):
        ran(f"Optimizer.{name}")
        raise AttributeError(name)


@odd
def an_optimizer_with_getattr():
    return trained_by(Lookup, momentum=0.9)


def _refuse(self, *_):
    ran("compared", draws=False)
    raise TypeError("not to be compared, hashed or asked whether it is true")


@odd
def an_optimizer_that_cannot_be_hashed_or_compared():
    names = ("__eq__", "__hash__", "__bool__", "__len__")
    return trained_by(type("SGD", (torch.optim.SGD,), dict.fromkeys(names, _refuse)), momentum=0.9)


class Mapping(dict):
    """Notes each access."""

    def __getitem__(self, key):
        ran(f"group[{key}]")
        return super().__getitem__(key)

    def get(self, key, default=None):
        ran(f"group.get({key})")
        return super().get(key, default)


class Several(list):
    """The same for a list."""

    def __iter__(self):
        ran("groups")
        return super().__iter__()

    def __getitem__(self, at):
        ran("groups[]")
        return super().__getitem__(at)

    def __len__(self):
        ran("len(groups)")
        return super().__len__()


@odd
def groups_of_their_own():
    class Odd(torch.optim.SGD):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.param_groups = Several(
                Mapping({**group, "params": Several(group["params"])}) for group in self.param_groups
            )

    return trained_by(Odd)


@odd
def a_state_of_its_own():
    class State(defaultdict):
        def __bool__(self):
            ran("bool(state)")
            return True

        def __len__(self):
            ran("len(state)")
            return super().__len__()

        def values(self):
            ran("state.values")
            return super().values()

    class Odd(torch.optim.Adam):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.state = State(dict)

    return trained_by(Odd)


@odd
def lbfgs_with_a_closure():
    model = layers()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3)

    def step(number):
        def closure():
            ran("closure")
            optimizer.zero_grad()
            loss = model(batch(number, 2, 4)).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return model, step


@odd
def a_scaler_of_its_own():
    from torch.cuda import amp

    kind = getattr(torch.amp, "GradScaler", None)
    scaler_of = amp.GradScaler if kind is None else lambda: Scaler("cpu", init_scale=4.0, growth_interval=2)

    class Scaler(kind or amp.GradScaler):
        def get_growth_interval(self):
            ran("get_growth_interval")
            return super().get_growth_interval()

        def get_growth_factor(self):
            ran("get_growth_factor")
            return super().get_growth_factor()

        def get_backoff_factor(self):
            ran("get_backoff_factor")
            return super().get_backoff_factor()

        def __getattr__(self, name):
            ran(f"Scaler.{name}")
            raise AttributeError(name)

    model, scaler = layers(), scaler_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(number):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch(number, 2, 4)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return model, step


class Rows(Dataset):
    """Draws a random number for each row that is read."""

    def __len__(self):
        ran("len(dataset)", draws=False)
        return 64

    def __getitem__(self, at):
        ran(f"dataset[{at}]")
        return torch.full((4,), at / 64)


@odd
def a_loader_that_draws():
    model, rows = layers(), Rows()
    loader = iter(DataLoader(rows, batch_size=2, sampler=RandomSampler(rows)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: ran("rate", draws=False) or 0.9**step)

    def loss(number):
        if number:
            schedule.step()
        return model(next(loader)).square().mean()

    return stepping(model, loss, optimizer)


@odd
def two_optimizers_and_one_that_wraps():
    model = layers()
    inner = torch.optim.Adam(model[0].parameters(), lr=0.05)

    class Wrapping(torch.optim.Optimizer):
        def __init__(self):
            self.inner = inner

        def __getattr__(self, name):
            ran(f"Wrapping.{name}")
            return getattr(self.inner, name)

        def step(self, closure=None):
            return self.inner.step(closure)

    other = torch.optim.SGD(model[2].parameters(), lr=0.05)
    return stepping(model, lambda number: model(batch(number, 2, 4)).square().mean(), Wrapping(), other)


class Keeps(torch.optim.Optimizer):
    """Keeps something else than a dict for each parameter."""

    def __init__(self, params, make):
        super().__init__(params, {})
        self.make = make

    def step(self):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.grad, alpha=-0.05)
                if parameter not in self.state:
                    self.state[parameter] = self.make(parameter)


def keeping(name, make):
    """Enter a training whose optimizer keeps that."""

    def training():
        model = layers()
        return stepping(
            model, lambda number: model(batch(number, 2, 4)).square().mean(), Keeps(model.parameters(), make)
        )

    training.__name__ = f"a_state_that_is_{name}"
    odd(training)


keeping("a_tensor", lambda parameter: parameter.detach().clone())
keeping("a_parameter", lambda parameter: torch.nn.Parameter(parameter.detach().clone()))
keeping("a_module", lambda _: torch.nn.Identity())
keeping("an_optimizer", lambda parameter: torch.optim.SGD([parameter], lr=0.1))
keeping("counted_in_nan", lambda _: {"step": torch.tensor(float("nan"))})
keeping("counted_in_inf", lambda _: {"step": float("inf")})
keeping("counted_in_complex_numbers", lambda _: {"step": torch.tensor(1 + 2j)})
keeping("counted_in_inference_mode", lambda _: {"step": inference(3.0)})


def inference(value):
    with torch.inference_mode():
        return torch.tensor(value)
