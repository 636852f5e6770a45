"""Devices that compute beside the processor, by the interface that `torch.cuda` and `torch.xpu` share.

A build of torch for ROCm has its GPUs as `torch.cuda`. A backend that is registered under a name of its own, such as `torch.npu`, has the
same functions (torch's notes "Accelerator Integration"). Apple's `torch.mps` lacks streams, so it is none of these: what is computed there
is copied at the end of the next step.

Nothing here initializes a device, or waits for one.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

_NEEDED = ("Event", "current_stream", "is_initialized", "stream")
_UNNAMED = "privateuseone"
"""The name of a backend that nobody has registered."""


class Accelerator:
    """The devices of one type.

    Attributes:
        kind: the type, as in `torch.device(kind)`.
    """

    def __init__(self, kind: str, torch_module: Any) -> None:
        self.kind, self._torch = kind, torch_module

    def is_in_use(self) -> bool:
        """Whether the program has initialized these devices."""
        return bool(self._torch.is_initialized())

    def stream(self, device: torch.device | None = None) -> Any:
        """Return the stream that is current on a device, by default on the current one."""
        return self._torch.current_stream(device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Return a context in which a stream is current."""
        return self._torch.stream(stream)  # type: ignore[no-any-return]

    def event(self, *, is_timed: bool = False) -> Any:
        """Return a new event, which has `record`, `query`, and if it is timed `elapsed_time`."""
        return self._torch.Event(enable_timing=is_timed)

    def memory(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the name of each device with the statistics of torch's allocator, as `torch.cuda.memory_stats_as_nested_dict` returns them.

        Devices on which nothing was allocated have none, nor have those whose torch module does not tell.
        """
        stats_of = getattr(self._torch, "memory_stats_as_nested_dict", None)
        if stats_of is None:
            return
        for at in range(self._torch.device_count()):
            stats = stats_of(at)
            if stats and stats["reserved_bytes"]["all"]["peak"]:
                yield f"{self.kind}:{at}", stats

    def allocated(self, device: torch.device | None) -> int:
        """Return the bytes allocated on a device, the current one for None; 0 if its torch module does not tell."""
        stats_of = getattr(self._torch, "memory_stats_as_nested_dict", None)
        stats = stats_of(device) if stats_of is not None else None
        return int(stats["allocated_bytes"]["all"]["current"]) if stats else 0

    def generators(self) -> Sequence[torch.Generator]:
        """Return the default generators of random numbers, one for each device."""
        return tuple(getattr(self._torch, "default_generators", ()))


@cache
def accelerator_of(kind: str) -> Accelerator | None:
    """Return the accelerator of a type of device; None for the host, and for types without streams."""
    module = (
        None if kind == "cpu" else getattr(sys.modules["torch"], kind, None)
    )  # a tool has no torch, but imports this file
    return Accelerator(kind, module) if all(hasattr(module, name) for name in _NEEDED) else None


def accelerators() -> list[Accelerator]:
    """Return the accelerators that this torch was built for, or that were registered, whether or not there is such a device."""
    return [found for kind in _kinds() if (found := accelerator_of(kind)) is not None]


def may_have_devices() -> bool:
    """Whether this torch can use any device but the host. Never asks for one: that would initialize it."""
    return bool(_kinds())


def _kinds() -> list[str]:
    torch = sys.modules["torch"]
    kinds = ["cuda"] if torch.backends.cuda.is_built() else []
    if getattr(getattr(torch, "xpu", None), "_is_compiled", bool)():
        kinds.append("xpu")
    name_of_other = getattr(torch._C, "_get_privateuse1_backend_name", None)  # noqa: SLF001 - there is no public name
    if name_of_other is not None and (name := name_of_other()) != _UNNAMED:  # HPU, NPU, ...
        kinds.append(name)
    return kinds
