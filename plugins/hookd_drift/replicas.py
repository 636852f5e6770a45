"""Which tensors all ranks should hold alike. Runs in the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names in a path that the wrappers of torch have put there."""


class Replica(NamedTuple):
    """One tensor, with what must be the same on a rank for it to be compared, and the global ranks that hold it."""

    name: str
    tensor: Tensor
    layout: tuple[object, ...]
    group: tuple[int, ...]


def replicas(models: Sequence[tuple[str, nn.Module]], *, is_all: bool, is_gradients: bool) -> list[Replica]:
    """Give the parameters that are alike on all ranks, or their gradients, each once.

    Args:
        models: roots, each with what its names begin with.
        is_all: not only what DistributedDataParallel holds.
        is_gradients: gradients, where a parameter has one.
    """
    found: list[Replica] = []
    seen: set[int] = set()
    for prefix, root in models:
        for path, model, ignored, group in [("", root, (), ())] if is_all else _parallel(root):
            for name, parameter in model.named_parameters(prefix=path):
                tensor = parameter.grad if is_gradients else parameter
                own = name[len(path) + 1 :] if path else name
                if id(parameter) in seen or own in ignored or tensor is None or not _is_whole(parameter, tensor):
                    continue
                seen.add(id(parameter))
                full = prefix + ".".join(part for part in name.split(".") if part not in WRAPPERS)
                layout = (full, tuple(tensor.shape), tensor.stride(), str(tensor.dtype))
                found.append(Replica(full, tensor, layout, group))
    return found


def _parallel(root: nn.Module) -> Iterator[tuple[str, nn.Module, Any, tuple[int, ...]]]:
    """Give every DistributedDataParallel in a model: its path, what it wraps, what it ignores, its ranks."""
    for path, module in root.named_modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            yield path, module.module, getattr(module, "parameters_to_ignore", ()), _ranks(module.process_group)


def _ranks(group: Any) -> tuple[int, ...]:
    """Give the global ranks of a process group; torch 1.11 has `_pg_group_ranks` alone, 2.0 the public name."""
    distributed = torch.distributed
    named = getattr(distributed, "get_process_group_ranks", None)
    if named is not None:
        return tuple(named(group))
    return tuple(sorted(distributed.distributed_c10d._pg_group_ranks.get(group, {})))  # noqa: SLF001


def _is_whole(parameter: Tensor, tensor: Tensor) -> bool:
    """Whether every rank holds all of it: no distributed tensor, no flat parameter of FSDP, no expert's."""
    is_part = hasattr(tensor, "to_local") or type(parameter).__name__ == "FlatParameter"
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    return is_plain and not is_part and bool(tensor.numel()) and getattr(parameter, "allreduce", True) is not False


def group_of(held: Sequence[Replica]) -> tuple[tuple[int, ...], ...]:
    """Give the process groups of some tensors."""
    return tuple(sorted({one.group for one in held}))


def owners(names: Sequence[str], most: int) -> list[str]:
    """Give the module of each parameter, joined at a depth at which there are `most` at most."""
    paths = [name.split(".")[:-1] for name in names]
    for depth in range(max((len(path) for path in paths), default=0), -1, -1):
        labels = [".".join(path[:depth]) or "(root)" for path in paths]
        if len(set(labels)) <= most:
            return labels
    return ["(root)"] * len(names)
