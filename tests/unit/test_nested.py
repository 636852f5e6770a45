"""The tensors that are found in the inputs and outputs of a module, and whether those are all."""

from __future__ import annotations

import dataclasses
from collections import UserDict, deque
from types import SimpleNamespace

import pytest
import torch

from hookd import is_whole, tensors
from hookd.api.nested import FROZEN

X = torch.ones(2)


@dataclasses.dataclass
class Record:
    x: object


class Other:
    x = X


def nested(depth):
    value = X
    for _ in range(depth):
        value = [value]
    return value


WHOLE = [
    X, None, 3, "text", (X, [X]), {"a": X, "b": None}, Record(X), SimpleNamespace(a=[X]), UserDict(a=X), deque([X]),
    [torch.float16, torch.device("cpu"), X], list(range(1000)), nested(7), [X] * 63, FROZEN({"a": X}),
]  # fmt: skip


@pytest.mark.parametrize("value", WHOLE)
def test_all_is_found(value):
    assert is_whole(value)


@pytest.mark.parametrize("value", [Other(), (X, Other()), nested(9), [X] * 65, {"a": [Other()]}, [1] * 64 + [X]])
def test_what_is_left_out_is_known(value):
    assert not is_whole(value)


@pytest.mark.parametrize(
    "value", [SimpleNamespace(a=[X]), UserDict(a=X), deque([X]), Record({"a": (X,)}), FROZEN(a=[X]), nested(7)]
)
def test_tensor_is_found_in(value):
    assert [one is X for one in tensors(value)] == [True]
