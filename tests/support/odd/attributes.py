"""Modules whose attributes are code: properties, `__getattr__`, lazily built ones, overridden methods."""

from __future__ import annotations

import functools

import torch
from torch import nn

from tests.support.evidence import ran
from tests.support.odd.table import odd, sgd


class WeightIsAProperty(nn.Linear):
    """Keeps its weight under another name."""

    def __init__(self, width):
        nn.Module.__init__(self)
        self.in_features = self.out_features = width
        self.own, self.bias = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.zeros(width))

    @property
    def weight(self):
        ran("weight")
        return self.own * 1.0


@odd
def a_weight_that_is_a_property():
    return sgd(nn.Sequential(WeightIsAProperty(4), nn.ReLU(), WeightIsAProperty(4)), 2, 4)


class WeightRaises(WeightIsAProperty):
    """Has no weight for other code."""

    @property
    def weight(self):
        ran("weight")
        raise RuntimeError("nobody reads this")

    def forward(self, x):
        return nn.functional.linear(x, self.own, self.bias)


@odd
def a_weight_that_raises():
    return sgd(nn.Sequential(WeightRaises(4), WeightRaises(4)), 2, 4)


def properties(*names):
    """Make a class whose plain attributes are properties that note their use."""

    def one(name):
        def get(self):
            ran(name)
            return self.__dict__[f"its_{name}"]

        def put(self, value):
            self.__dict__[f"its_{name}"] = value

        return property(get, put)

    return {name: one(name) for name in names}


@odd
def a_linear_whose_widths_are_properties():
    kind = type("Linear", (nn.Linear,), properties("in_features", "out_features", "training"))
    return sgd(nn.Sequential(kind(4, 4), kind(4, 4)), 2, 4)


@odd
def a_convolution_whose_settings_are_properties():
    kind = type("Conv2d", (nn.Conv2d,), properties("kernel_size", "stride", "padding", "dilation", "groups"))
    return sgd(kind(3, 4, 3), 2, 3, 5, 5)


@odd
def a_batch_norm_whose_settings_are_properties():
    names = ("training", "track_running_stats", "momentum", "affine", "num_features")
    kind = type("BatchNorm1d", (nn.BatchNorm1d,), properties(*names))
    model = nn.Sequential(kind(4), nn.Linear(4, 4), kind(4))
    model[2].eval()
    return sgd(model, 3, 4)


@odd
def attention_whose_settings_are_properties():
    names = ("embed_dim", "num_heads", "batch_first", "bias_k", "add_zero_attn", "training", "_qkv_same_embed_dim")
    kind = type("MultiheadAttention", (nn.MultiheadAttention,), properties(*names))

    def loss(y):
        return y[0].square().mean()

    return sgd(kind(4, 2), 3, 2, 4, loss=loss, key=torch.ones(3, 2, 4), value=torch.ones(3, 2, 4))


@odd
def a_recurrent_module_whose_settings_are_properties():
    names = ("mode", "hidden_size", "input_size", "proj_size", "num_layers", "bidirectional", "batch_first")
    kind = type("GRU", (nn.GRU,), properties(*names))
    return sgd(kind(4, 4), 3, 2, 4, loss=lambda y: y[0].square().mean())


class LooksUp(nn.Module):
    """Notes each lookup that `__getattr__` handles."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def __getattr__(self, name):
        ran(f"__getattr__({name})")
        return super().__getattr__(name)

    def forward(self, x):
        return self.inner(x)


@odd
def a_module_with_getattr():
    return sgd(LooksUp(), 2, 4)


@odd
def a_linear_with_getattr():
    kind = type("Linear", (nn.Linear,), {"__getattr__": LooksUp.__getattr__})
    kind.__getattr__ = lambda self, name: ran(f"__getattr__({name})") or nn.Module.__getattr__(self, name)
    return sgd(nn.Sequential(kind(4, 4), kind(4, 4)), 2, 4)


@odd
def a_module_whose_getattr_raises_something_else():
    def lookup(self, name):
        ran(f"__getattr__({name})")
        instance = object.__getattribute__(self, "__dict__")
        for kind in ("_parameters", "_buffers", "_modules"):
            if name in instance.get(kind, {}):
                return instance[kind][name]
        raise LookupError(name)

    kind = type("Linear", (nn.Linear,), {})
    model = nn.Sequential(kind(4, 4), kind(4, 4))
    kind.__getattr__ = lookup  # torch's own constructor looks for missing attributes
    return sgd(model, 2, 4)


@odd
def a_module_that_notes_every_attribute():
    def lookup(self, name):
        ran(f"__getattribute__({name})", draws=False)
        return object.__getattribute__(self, name)

    kinds = [type(kind.__name__, (kind,), {"__getattribute__": lookup}) for kind in (nn.Linear, nn.BatchNorm1d)]
    return sgd(nn.Sequential(kinds[0](4, 4), kinds[1](4), kinds[0](4, 4)), 3, 4)


class Built(nn.Linear):
    """Builds its parts when they are first accessed."""

    def __init__(self):
        nn.Module.__init__(self)
        self.in_features = self.out_features = 4
        self.bias = nn.Parameter(torch.zeros(4))
        self.wants = False

    @functools.cached_property
    def weight(self):
        ran("weight")
        made = nn.Parameter(torch.randn(4, 4))
        self.register_parameter("made", made)
        return made

    def forward(self, x):
        self.wants = not self.wants
        return super().forward(x) if self.wants else x * self.bias


@odd
def a_weight_that_is_built_when_it_is_asked_for():
    return sgd(nn.Sequential(Built(), Built()), 2, 4)


METHODS = (
    "named_modules modules named_children children named_parameters parameters named_buffers buffers state_dict train eval"
    " requires_grad_ apply get_submodule get_parameter extra_repr _get_name __repr__ __dir__ __len__ __iter__ __bool__"
    " __contains__ __eq__ __hash__ __reduce_ex__ __getstate__ __deepcopy__ __sizeof__"
).split()


def noting(base, names=METHODS):
    """Make a class that notes each use of its methods, some of which make no sense."""

    def one(name):
        def method(self, *args, **kwargs):
            ran(name)
            if name in ("__len__", "__hash__"):
                return 0
            if name in ("__eq__", "__bool__", "__contains__"):
                return False
            return getattr(super(kind, self), name)(*args, **kwargs)

        return method

    kind = type(base.__name__, (base,), {name: one(name) for name in names})
    return kind


@odd
def a_module_whose_methods_are_its_own():
    model = noting(nn.Sequential, [name for name in METHODS if name not in ("__iter__", "__len__")])
    linear, norm = noting(nn.Linear), noting(nn.BatchNorm1d)
    return sgd(model(linear(4, 4), norm(4), linear(4, 4)), 3, 4)


@odd
def modules_that_cannot_be_hashed_or_compared():
    def refuse(self, *_):
        ran("compared", draws=False)
        raise TypeError("not to be compared, hashed or asked whether it is true")

    names = ("__eq__", "__hash__", "__bool__", "__len__")
    kinds = [type(kind.__name__, (kind,), dict.fromkeys(names, refuse)) for kind in (nn.Linear, nn.ReLU)]

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = kinds[0](4, 4), kinds[1]()

        def forward(self, x):
            return self.b(self.a(x))

    return sgd(type("Chain", (Chain,), dict.fromkeys(names, refuse))(), 2, 4)


@odd
def a_module_that_says_it_is_another():
    def kind_of(self):
        ran("__class__")
        return nn.Linear

    return sgd(nn.Sequential(type("Tanh", (nn.Tanh,), {"__class__": property(kind_of)})(), nn.Linear(4, 4)), 2, 4)


class Meta(type):
    """Notes each access to the class."""

    def __getattr__(cls, name):
        ran(f"{cls.__name__}.{name}")
        raise AttributeError(name)

    def __instancecheck__(cls, other):
        ran("__instancecheck__")
        return super().__instancecheck__(other)

    def __subclasscheck__(cls, other):
        ran("__subclasscheck__")
        return super().__subclasscheck__(other)


@odd
def a_module_with_a_metaclass():
    kind = Meta("Linear", (nn.Linear,), {})
    return sgd(nn.Sequential(kind(4, 4), kind(4, 4)), 2, 4)


class Descriptor:
    """Notes each access, also those on the class."""

    def __init__(self, value):
        self.value = value

    def __get__(self, instance, kind=None):
        ran("a descriptor")
        return self.value if instance is None else self.value.__get__(instance, kind)


@odd
def a_forward_that_is_a_descriptor():
    kind = type("Linear", (nn.Linear,), {"forward": Descriptor(nn.Linear.forward)})
    return sgd(nn.Sequential(kind(4, 4), kind(4, 4)), 2, 4)


@odd
def modules_that_are_never_called_and_odd():
    """hookd inspects a module that is never called, to see whether its parameters get gradients."""
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "direct": LooksUp(), "idle": noting(nn.Linear)(4, 4)})
    model.forward = lambda x: model["direct"].forward(model["used"](x))
    return sgd(model, 2, 4)


@odd
def a_module_with_a_call_of_its_own():
    def call(self, *args, **kwargs):
        ran("__call__")
        return nn.Linear.__call__(self, *args, **kwargs)

    def inner(self, *args, **kwargs):
        ran("_call_impl")
        return nn.Linear._call_impl(self, *args, **kwargs)

    kinds = type("Linear", (nn.Linear,), {"__call__": call}), type("Linear", (nn.Linear,), {"_call_impl": inner})
    return sgd(nn.Sequential(kinds[0](4, 4), kinds[1](4, 4)), 2, 4)


@odd
def a_module_that_was_never_initialized():
    class Bare(nn.Module):
        def __init__(self):  # the classical mistake: torch has a message of its own for it
            self.scale = 2.0

        def forward(self, x):
            return x * self.scale

    return Bare(), lambda number: Bare()(torch.ones(2, number + 1))
