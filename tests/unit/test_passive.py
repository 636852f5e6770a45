"""The attributes of a module, an optimizer and a tensor are read without running any of their code."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import hookd


class Guarded(nn.Linear):
    """Raises at any access."""

    constant = 3
    computed = property(lambda self: 1 / 0)

    def method(self):
        raise AssertionError("called")

    def __getattribute__(self, name):
        raise AssertionError(name)

    __eq__ = __hash__ = __len__ = __bool__ = named_modules = named_parameters = method


@pytest.fixture
def guarded():
    module = nn.Linear(2, 3)
    module.add_module("child", nn.BatchNorm1d(2))
    module.add_module("none", None)
    module.register_parameter("nothing", None)
    module.__class__ = Guarded
    return module


def test_plain_values_are_read(guarded):
    assert hookd.peek(guarded, "in_features") == 2
    assert hookd.peek(guarded, "training") is True
    assert hookd.peek(guarded, "constant") == 3
    assert hookd.peek(guarded, "weight") is hookd.parameters_of(guarded)["weight"]
    assert hookd.peek(guarded, "child") is hookd.children_of(guarded)["child"]


@pytest.mark.parametrize("name", ["computed", "method", "there_is_no_such_thing"])
def test_for_what_only_code_could_tell_there_is_the_default(guarded, name):
    assert hookd.peek(guarded, name, "default") == "default"


def test_what_is_none_is_left_out(guarded):
    assert list(hookd.parameters_of(guarded)) == ["weight", "bias"]
    assert list(hookd.children_of(guarded)) == ["child"]
    assert hookd.buffers_of(guarded) == {}


def test_a_slot_is_a_place_and_no_code():
    class Slotted:
        __slots__ = ("empty", "full")

    holder = Slotted()
    holder.full = 1
    assert hookd.peek(holder, "full") == 1
    assert hookd.peek(holder, "empty", 2) == 2


def test_all_below_a_module_is_what_torch_says():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(nn.LSTM(2, 2), shared), nn.TransformerEncoderLayer(4, 2))
    model[2].linear1.weight = model[2].linear2.weight
    assert [(name, id(one)) for name, one in hookd.modules_in(model)] == [
        (name, id(one)) for name, one in model.named_modules()
    ]
    assert [(name, id(one)) for name, one in hookd.parameters_in(model)] == [
        (name, id(one)) for name, one in model.named_parameters()
    ]


@pytest.mark.parametrize("make", [parametrizations.spectral_norm, parametrizations.orthogonal])
def test_the_original_of_a_parametrized_weight(make):
    module = make(nn.Linear(3, 3))
    assert [id(one) for one in hookd.originals_of(module, "weight")] == [id(module.parametrizations.weight.original)]
    assert hookd.peek(module, "weight") is None


def test_there_may_be_several_originals():
    module = parametrizations.weight_norm(nn.Linear(3, 3))
    parametrized = module.parametrizations.weight
    assert [id(one) for one in hookd.originals_of(module, "weight")] == [
        id(parametrized.original0),
        id(parametrized.original1),
    ]


def test_a_buffer_may_be_an_original():
    module = nn.BatchNorm1d(3)
    parametrize.register_parametrization(module, "running_mean", nn.Identity())
    (original,) = hookd.originals_of(module, "running_mean")
    assert original is module.parametrizations.running_mean.original


def test_of_a_plain_weight_it_is_the_original_itself():
    module = nn.Linear(3, 3, bias=False)
    assert hookd.originals_of(module, "weight")[0] is module.weight
    assert hookd.originals_of(module, "bias") == []


@pytest.mark.parametrize("base", [dict, OrderedDict])
def test_a_table_is_read_past_its_class(base):
    class Table(base):
        def __getitem__(self, key):
            raise AssertionError(key)

        __iter__ = __len__ = keys = values = items = get = __getitem__

    module = nn.Linear(2, 2)
    names = list(module._parameters)
    table = Table()
    for name, parameter in module._parameters.items():
        base.__setitem__(table, name, parameter)
    module.__dict__["_parameters"] = table
    assert list(hookd.parameters_of(module)) == names


def test_the_order_of_an_ordered_dict_is_its_own():
    class Table(OrderedDict):
        pass

    module = nn.Linear(2, 2)
    module.__dict__["_parameters"] = table = Table(module._parameters)
    table.move_to_end("weight")
    assert list(hookd.parameters_of(module)) == ["bias", "weight"]


def test_the_groups_of_an_optimizer_are_plain():
    class Group(dict):
        def __getitem__(self, key):
            raise AssertionError(key)

    class Several(list):
        def __iter__(self):
            raise AssertionError("iterated")

    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    optimizer.param_groups = Several([Group({"params": Several([parameter]), "lr": 0.5})])
    (group,) = hookd.groups_of(optimizer)
    assert group["lr"] == 0.5
    assert group["params"][0] is parameter


def test_groups_that_only_code_could_tell_are_none():
    assert hookd.groups_of(type("Odd", (), {"param_groups": property(lambda self: 1 / 0)})()) == []


class Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(function)


def test_a_tensor_is_asked_past_its_class():
    tensor = torch.ones(2, requires_grad=True).as_subclass(Refusing)
    assert hookd.of_tensor(tensor, "requires_grad")
    assert hookd.of_tensor(tensor, "shape") == (2,)
    assert hookd.of_tensor(tensor, "there_is_no_such_thing") is None
