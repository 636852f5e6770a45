"""What is bad in a tensor of any kind: strided, sparse, nested, complex, float8, a subclass. Runs in the target."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

INF = math.inf
STRIDED = torch.strided
REAL = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
PLAIN = frozenset((Tensor, torch.nn.Parameter))
SPARSE = frozenset(getattr(torch, name, None) for name in ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"))


def on_host(tensor: Tensor) -> bool:
    """Say whether reading a value of `tensor` costs nothing."""
    return tensor.is_cpu


def is_nested(tensor: Tensor) -> bool:
    """Whether it is a nested tensor; torch 1.11 has none."""
    return getattr(tensor, "is_nested", False)


def is_plain(tensor: Tensor) -> bool:
    """Whether it is what nearly all tensors are: strided, of a common floating-point type, and of no subclass."""
    return type(tensor) in PLAIN and tensor.dtype in REAL and tensor.layout is STRIDED and not is_nested(tensor)


def plain(tensor: Tensor) -> Tensor | None:
    """Give the real floating-point numbers of any tensor, as a view where that is possible.

    Returns:
        None where there are none: integers, empty, meta, quantized and unknown kinds of tensors.
    """
    if is_plain(tensor):
        return tensor if tensor.numel() and not tensor.is_meta else None
    if is_nested(tensor) or tensor.layout in SPARSE:
        tensor = tensor.values()
    if type(tensor) not in PLAIN:
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()  # a DTensor: reducing it as a whole would talk to other ranks
        elif hasattr(tensor, "__tensor_flatten__"):
            return None  # made of other tensors, in a way that only its own class knows
        else:
            tensor = tensor.as_subclass(Tensor)
    elif tensor.layout == torch.sparse_coo:
        tensor = tensor._values()  # noqa: SLF001 - values() would want it coalesced first
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.layout != STRIDED or tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return None
    return tensor if tensor.dtype in REAL else tensor.float()  # float8 has no reductions


def dense(tensor: Tensor) -> Tensor:
    """Order the dimensions as they lie in memory: reducing a transposed tensor as it is takes 12 times as long."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def own_tensors(module: torch.nn.Module | None) -> dict[str, Tensor]:
    """Give the parameters and buffers that `module` itself owns."""
    if module is None:
        return {}
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def kind_of(low: float, high: float, *, masks: bool = False) -> str:
    """Judge a range of which aminmax made both ends NaN if there is one: "nan", "inf" or ""."""
    if high < INF and (low > -INF or masks):
        return ""
    return "nan" if math.isnan(high) else "inf"


def counts(tensor: Tensor) -> dict[str, Any]:
    """Count exactly; only ever called for the one tensor of an incident."""
    real = plain(tensor)
    if real is None:
        return {}
    return {
        "nan_count": int(real.isnan().sum()),
        "inf_count": int(real.isinf().sum()),
        "elements": real.numel(),
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).replace("torch.", ""),
    }
