"""Whatever a module returns, hookd_nan finds the bad values in it, and nothing where there are no numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from tests.support.layered import INF, NAN


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: object = None


class Source(nn.Module):
    """Makes a value out of nothing."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, _x):
        return self.make()


def coo(*values):
    return torch.sparse_coo_tensor(
        torch.tensor([list(range(len(values)))]), torch.tensor(values), (9,), check_invariants=True
    )


BAD = {
    "dict": lambda: {"ids": torch.arange(3), "logits": torch.tensor([1.0, NAN])},
    "tuple": lambda: (torch.ones(2), (torch.ones(1), torch.tensor([NAN]))),
    "list": lambda: [torch.ones(2), None, torch.tensor([NAN])],
    "dataclass": lambda: Output(torch.ones(2), {"deep": [torch.tensor([NAN])]}),
    "float64": lambda: torch.tensor([1.0, NAN], dtype=torch.float64),
    "bfloat16": lambda: torch.tensor([1.0, NAN], dtype=torch.bfloat16),
    "float16": lambda: torch.tensor([1.0, NAN], dtype=torch.float16),
    "float8_e4m3fn": lambda: torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda: torch.tensor([1.0, INF]).to(torch.float8_e5m2),
    "complex": lambda: torch.tensor([1 + 1j, complex(0, NAN)]),
    "conjugate": lambda: torch.tensor([1 + 1j, complex(0, NAN)]).conj(),
    "sparse": lambda: coo(1.0, NAN),
    "csr": lambda: torch.tensor([[0.0, NAN]]).to_sparse_csr(),
    "transposed": lambda: torch.tensor([[1.0, 2.0], [3.0, NAN]]).t(),
    "expanded": lambda: torch.tensor([NAN]).expand(3, 4),
    "strided": lambda: torch.tensor([1.0, 2.0, NAN, 4.0])[::2],
    "scalar": lambda: torch.tensor(NAN),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.tensor([NAN])], layout=torch.jagged),
    "parameter": lambda: nn.Parameter(torch.tensor([NAN])),
}
GOOD = {
    "integers": lambda: torch.arange(5),
    "booleans": lambda: torch.ones(3, dtype=torch.bool),
    "nothing": lambda: None,
    "empty": lambda: torch.empty(0, 3),
    "meta": lambda: torch.empty(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "empty sparse": lambda: torch.sparse_coo_tensor(size=(3,), check_invariants=True),
    "text": lambda: "text",
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
}


class TestKindsOfOutputs:
    @pytest.mark.parametrize("name", BAD)
    @pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
    def test_bad_value_is_found_in(self, hook, name):
        model = nn.Sequential(nn.Identity(), Source(BAD[name]))
        hook.start("nan")
        model(torch.ones(1))
        assert (hook.incident.module, hook.incident.fields["where"]) == ("1", "output")

    @pytest.mark.parametrize("name", GOOD)
    @pytest.mark.filterwarnings("ignore:.*quantiz.*")
    def test_nothing_is_found_in(self, hook, name):
        model = nn.Sequential(nn.Identity(), Source(GOOD[name]))
        hook.start("nan")
        model(torch.ones(1))
        assert hook.incidents == []

    def test_subclass_of_tensor_is_looked_at(self, hook):
        class Image(torch.Tensor):
            pass

        hook.start("nan")
        nn.Sequential(Source(lambda: torch.tensor([NAN]).as_subclass(Image)))(torch.ones(1))
        assert hook.incident.module == "0"
