"""Inputs and outputs of modules: containers and tensors with code of their own."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, UserDict, UserList, deque
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn

from tests.support.evidence import ran, take_notes
from tests.support.odd.table import batch, odd, sgd, stepping

READING = "__getitem__ __iter__ __len__ __bool__ __eq__ __contains__ values items keys get copy __reduce_ex__".split()


def noting(base, names=READING):
    """Make a container that notes each access to it."""

    def one(name):
        def method(self, *args, **kwargs):
            ran(f"{base.__name__}.{name}")
            if name == "__bool__":
                return True
            return getattr(super(kind, self), name)(*args, **kwargs)

        return method

    kind = type(
        base.__name__, (base,), {name: one(name) for name in names if hasattr(base, name) or name == "__bool__"}
    )
    return kind


class Wraps(nn.Module):
    """Wraps its output in a container, and accepts such a container as an input."""

    def __init__(self, wrap, unwrap):
        super().__init__()
        self.inner, self.wrap, self.unwrap = nn.Linear(4, 4), wrap, unwrap

    def forward(self, x):
        return self.wrap(self.inner(x if isinstance(x, torch.Tensor) else self.unwrap(x)))


def through(wrap, unwrap):
    """Pass containers from module to module, and compute the loss of the last one's content."""
    return sgd(nn.Sequential(Wraps(wrap, unwrap), Wraps(wrap, unwrap)), 2, 4, loss=lambda y: unwrap(y).square().mean())


@odd
def a_dict_of_its_own():
    return through(lambda y: noting(dict)(y=y), lambda instance: dict.__getitem__(instance, "y"))


@odd
def an_ordered_dict_of_its_own():
    return through(lambda y: noting(OrderedDict)(y=y), lambda instance: OrderedDict.__getitem__(instance, "y"))


@odd
def a_user_dict():
    return through(lambda y: noting(UserDict)(y=y), lambda instance: instance.__dict__["data"]["y"])


@odd
def a_user_list():
    return through(lambda y: noting(UserList)([y]), lambda instance: instance.__dict__["data"][0])


@odd
def a_list_of_its_own():
    return through(lambda y: noting(list)([y, 1]), lambda instance: list.__getitem__(instance, 0))


@odd
def a_tuple_of_its_own():
    return through(lambda y: noting(tuple)((y, 1)), lambda instance: tuple.__getitem__(instance, 0))


@odd
def a_deque_of_its_own():
    return through(lambda y: noting(deque)((y, 1)), lambda instance: deque.__getitem__(instance, 0))


class Pair(NamedTuple):
    y: object
    z: int


class Named(Pair):
    """Has fields that note when they are read."""

    __slots__ = ()
    y = property(lambda self: ran("y") or tuple.__getitem__(self, 0))


@odd
def a_named_tuple_of_its_own():
    return through(lambda y: Named(y, 1), lambda instance: tuple.__getitem__(instance, 0))


@dataclasses.dataclass
class Output(OrderedDict):
    """Like Hugging Face's outputs: a dataclass that is a dict of its fields, and notes each access."""

    y: torch.Tensor

    def __post_init__(self):
        super().__setitem__("y", self.y)

    def __getattribute__(self, name):
        if not name.startswith("__"):
            ran(f"Output.{name}")
        return super().__getattribute__(name)


@odd
def an_output_that_is_a_dict_and_a_dataclass():
    return through(Output, lambda instance: OrderedDict.__getitem__(instance, "y"))


class Field:
    """A descriptor as a dataclass's field."""

    def __set_name__(self, kind, name):
        self.name = f"_{name}"

    def __get__(self, instance, kind=None):
        if instance is None:
            raise AttributeError(self.name)  # so it has no default
        ran("a field")
        return instance.__dict__[self.name]

    def __set__(self, instance, value):
        instance.__dict__[self.name] = value


@dataclasses.dataclass
class Described:
    y: torch.Tensor = Field()
    z: int = 0

    @functools.cached_property
    def lazy(self):
        ran("lazy")
        return self.z


@odd
def a_dataclass_with_descriptors():
    return through(Described, lambda instance: instance.__dict__["_y"])


@dataclasses.dataclass
class Slotted:
    __slots__ = ("y",)
    y: torch.Tensor

    def __getattribute__(self, name):
        ran(f"Slotted.{name}", draws=False)
        return super().__getattribute__(name)


@odd
def a_dataclass_with_slots():
    return through(Slotted, Slotted.__dict__["y"].__get__)


class Space(SimpleNamespace):
    def __getattribute__(self, name):
        ran(f"Space.{name}")
        return super().__getattribute__(name)


@odd
def a_namespace_of_its_own():
    return through(lambda y: Space(y=y), lambda instance: object.__getattribute__(instance, "y"))


class Lazy:
    """Makes its value at any access, as the lazy objects of Django and werkzeug do."""

    def __init__(self, make):
        object.__setattr__(self, "make", make)

    def __getattribute__(self, name):
        ran(f"Lazy.{name}")
        return getattr(object.__getattribute__(self, "make")(), name)

    __class__ = property(lambda self: ran("Lazy.__class__") or torch.Tensor)


@odd
def a_lazy_object():
    return through(lambda y: Lazy(lambda: y), lambda instance: object.__getattribute__(instance, "make")())


class Refuses:
    """Cannot be compared, hashed, counted or shown."""

    def _refuse(self, *_):
        ran("refused", draws=False)
        raise RuntimeError("leave it alone")

    __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __repr__ = __str__ = __getattr__ = _refuse

    def __init__(self, y):
        self.y = y


@odd
def an_object_that_refuses_everything():
    return through(Refuses, lambda instance: instance.__dict__["y"])


class Noted(torch.Tensor):
    """Notes every torch function that uses it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        ran(getattr(function, "__name__", "?"))
        return super().__torch_function__(function, types, args, kwargs or {})


def wrapped(kind):
    """Train on inputs of a class of tensors."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return stepping(model, lambda number: model(batch(number, 2, 4).as_subclass(kind)).square().mean())


@odd
def tensors_that_note_every_function():
    return wrapped(Noted)


class NotedParameter(nn.Parameter):
    """Notes every torch function that uses it; as a parameter."""

    __torch_function__ = Noted.__torch_function__

    @property
    def grad_norm(self):
        ran("grad_norm")
        return 0.0


@odd
def parameters_that_note_every_function():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    for module in (model[0], model[2]):
        module._parameters["weight"] = NotedParameter(module._parameters["weight"].detach())
    return sgd(model, 3, 4)


@odd
def buffers_that_note_every_function():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1]._buffers["running_mean"] = model[1].running_mean.as_subclass(Noted)
    return sgd(model, 3, 4)


class LooksLike(torch.Tensor):
    """A tensor whose attributes are its own."""

    requires_grad = property(lambda self: ran("requires_grad") or torch.Tensor.requires_grad.__get__(self))
    grad_fn = property(lambda self: ran("grad_fn") or torch.Tensor.grad_fn.__get__(self))
    shape = property(lambda self: ran("shape") or torch.Tensor.shape.__get__(self))
    is_cpu = property(lambda self: ran("is_cpu") or torch.Tensor.is_cpu.__get__(self))
    layout = property(lambda self: ran("layout") or torch.Tensor.layout.__get__(self))

    def __getattr__(self, name):
        ran(f"LooksLike.{name}")
        raise AttributeError(name)

    def numel(self):
        ran("numel")
        return super().numel()

    def detach(self):
        ran("detach")
        return super().detach()


@odd
def tensors_whose_attributes_are_their_own():
    return wrapped(LooksLike)


def backward_from(several):
    """Start the backward at several losses at once."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(number):
        losses = [row.square().mean() for row in model(batch(number, 2, 4))]
        optimizer.zero_grad()
        torch.autograd.backward(several(losses))
        optimizer.step()
        return losses[0].detach()

    return model, step


@odd
def a_backward_from_a_generator():
    return backward_from(lambda losses: (loss for loss in losses))


@odd
def a_backward_from_a_list_of_its_own():
    return backward_from(noting(list))


@odd
def a_generator_as_an_output():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return (row * 2 for row in self.inner(x))

    return sgd(Rows(), 2, 4, loss=lambda rows: sum(row.square().mean() for row in rows))


ATTRIBUTES = (
    "grad",
    "requires_grad",
    "shape",
    "dtype",
    "device",
    "is_cpu",
    "is_leaf",
    "layout",
    "is_quantized",
    "is_nested",
)
ASKED = ("numel", "dim", "size", "stride", "detach", "reshape", "element_size", "untyped_storage", "is_floating_point")


def watchful(base, name):
    """Make a class of tensors that notes each access."""

    def attribute(name):
        found = getattr(torch.Tensor, name)
        return property(lambda self: ran(name) or found.__get__(self), found.__set__)

    def method(name):
        return lambda self, *args: ran(name) or getattr(torch.Tensor, name)(self, *args)

    def missing(self, name):
        ran(f"{type(self).__name__}.{name}")
        raise AttributeError(name)

    own = {**{name: attribute(name) for name in ATTRIBUTES}, **{name: method(name) for name in ASKED}}
    return type(name, (base,), {**own, "__getattr__": missing})


WatchfulParameter, WatchfulTensor = (
    watchful(nn.Parameter, "WatchfulParameter"),
    watchful(torch.Tensor, "WatchfulTensor"),
)


class Layer(nn.Linear):
    """A linear layer with parameters of that class, whose forward reads none of their attributes."""

    def __init__(self, width):
        super().__init__(width, width)
        for name, parameter in list(self._parameters.items()):
            self._parameters[name] = torch.Tensor.detach(parameter).as_subclass(WatchfulParameter)
            torch.Tensor.requires_grad_(self._parameters[name])

    def forward(self, x):
        with torch._C.DisableTorchFunction():
            return torch.addmm(self._parameters["bias"], x, self._parameters["weight"])


class Past(torch.optim.Optimizer):
    """Bypasses the class of its parameters."""

    def zero_grad(self):
        for parameter in self.param_groups[0]["params"]:
            torch.Tensor.grad.__set__(parameter, None)

    def step(self):
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for parameter in self.param_groups[0]["params"]:
                torch.Tensor.add_(parameter, torch.Tensor.grad.__get__(parameter), alpha=-0.05)


@odd
def parameters_whose_attributes_are_their_own():
    model = nn.Sequential(Layer(4), nn.BatchNorm1d(4), Layer(4))
    model.never = Layer(4)
    for name in ("running_mean", "running_var"):
        model._modules["1"]._buffers[name] = getattr(model[1], name).as_subclass(WatchfulTensor)
    optimizer = Past(nn.Sequential.parameters(model[:3]), {})
    take_notes()
    return stepping(model, lambda number: model(batch(number, 3, 4)).square().mean(), optimizer)


class Looking(type):
    """A metaclass that notes which missing attributes its classes are asked for."""

    @property
    def __module__(cls):
        ran("__module__")
        return "odd"

    def __getattr__(cls, name):
        ran(f"{name} of a class")
        raise AttributeError(name)


class Box(metaclass=Looking):
    def __init__(self, x):
        self.x = x


@odd
def an_output_whose_class_has_a_metaclass():
    return through(Box, lambda box: object.__getattribute__(box, "__dict__")["x"])
