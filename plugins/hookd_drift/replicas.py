"""Find the tensors that should be equal on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hookd import children_of, modules_in, name_within, names_above, of_tensor, owner_of, parameters_in, peek

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Parts of a parameter's name that come from wrappers of torch."""


class Replica(NamedTuple):
    """One tensor, the layout that ranks must share to be compared, and the global ranks that have it."""

    name: str
    tensor: Tensor
    layout: tuple[object, ...]
    group: tuple[int, ...]


def replicas(
    models: Sequence[tuple[str, nn.Module]],
    is_readable: Callable[[Tensor], bool],
    *,
    is_all: bool,
    is_gradients: bool,
) -> list[Replica]:
    """Return the parameters that should be equal on all ranks, or their gradients, each once.

    Args:
        models: roots, each with its name.
        is_readable: `Context.is_readable`.
        is_all: all parameters, not only those in a DistributedDataParallel.
        is_gradients: gradients instead of parameters, if there are any.
    """
    found: list[Replica] = []
    seen: set[int] = set()
    for root_name, root in models:
        for path, model, ignored, group in [("", root, (), ())] if is_all else _parallel(root):
            for own, parameter in parameters_in(model):
                name = f"{path}.{own}" if path else own
                tensor = of_tensor(parameter, "grad") if is_gradients else parameter
                if id(parameter) in seen or own in ignored or tensor is None or not _is_whole(parameter, tensor):
                    continue
                if not is_readable(tensor):
                    continue
                seen.add(id(parameter))
                full = name_within(root_name, ".".join(part for part in name.split(".") if part not in WRAPPERS))
                layout = (full, tuple(tensor.shape), tensor.stride(), str(tensor.dtype))
                found.append(Replica(full, tensor, layout, group))
    return found


def _parallel(root: nn.Module) -> Iterator[tuple[str, nn.Module, Any, tuple[int, ...]]]:
    """Yield every DistributedDataParallel in a model: its path, its module, the names that it ignores, its ranks."""
    for path, module in modules_in(root):
        if issubclass(type(module), torch.nn.parallel.DistributedDataParallel):
            ignored, group = peek(module, "parameters_to_ignore", ()), peek(module, "process_group")
            yield path, children_of(module)["module"], ignored, _ranks(group)


def _ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group."""
    # torch 2.0 has the public name, 1.11 only `_pg_group_ranks`.
    distributed = torch.distributed
    named = getattr(distributed, "get_process_group_ranks", None)
    if named is not None:
        return tuple(named(group))
    return tuple(sorted(distributed.distributed_c10d._pg_group_ranks.get(group, {})))  # noqa: SLF001


def _is_whole(parameter: Tensor, tensor: Tensor) -> bool:
    """Whether every rank has all of it: not distributed, not a flat parameter of FSDP, not an expert's."""
    is_part = hasattr(type(tensor), "to_local") or type(parameter).__name__ == "FlatParameter"
    return not is_part and not of_tensor(tensor, "is_quantized") and peek(parameter, "allreduce", True) is not False


def group_of(tensors: Sequence[Replica]) -> tuple[tuple[int, ...], ...]:
    """Return the process groups of some tensors, sorted."""
    return tuple(sorted({replica.group for replica in tensors}))


def owners(names: Sequence[str], most: int) -> list[str]:
    """Return the module of each parameter, cut at the greatest depth that leaves at most `most` modules."""
    lineages = [[*reversed(names_above(owner)), owner] for owner, _ in map(owner_of, names)]
    for depth in range(max(map(len, lineages), default=1) - 1, -1, -1):
        labels = [lineage[min(depth, len(lineage) - 1)] for lineage in lineages]
        if len(set(labels)) <= most:
            return labels
    return ["(root)"] * len(names)  # more roots than series
