"""Liveness facts that only the process can report.

They serve the diagnosis of a hang from outside. hookd's own thread publishes them once a second, never the training. If
some thread takes the GIL and keeps it, the page still has the last values before that, and `hookd_agent_ticks` stands
still.
"""

from __future__ import annotations

import sys
import zlib
from typing import TYPE_CHECKING, Any

from hookd.api.metrics import Counter, Gauge
from hookd.wire.frames import innermost_frames

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hookd.wire.page import PageWriter

MAX_GROUPS = 16
MAX_NAME = 64
_CONVERTS = "torch/_dynamo/convert_frame.py"
_COMPILES = "torch/_inductor/compile_fx.py"


class Liveness:
    """Publishes issued collectives, and whether torch compiles. For hookd's own thread only."""

    def __init__(self, page: PageWriter) -> None:
        self._ticks = Counter(
            page, "hookd_agent_ticks", "Times that hookd's own thread ran in the target: about once a second."
        ).labels()
        self._compiling = Gauge(page, "hookd_compiling", "1 while torch.compile compiles in the target.").labels()
        self._issued = Counter(
            page, "hookd_collectives", "Collectives that this rank has issued, by the ranks of the group.",
            ("group",),
        )  # fmt: skip

    def tick(self) -> None:
        """Publish the current values."""
        self._compiling.set(float(_is_compiling()))
        for group, issued in _issued():
            child = self._issued.labels(group)
            child.cells[child.at] = float(issued)  # not a sum: it is compared with that of other ranks
        self._ticks.inc()  # last: a reader who sees it change then reads values that are at least as new


def _is_compiling() -> bool:
    """Whether a thread is in dynamo's or inductor's compiler (torch 2.0 to 2.14)."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        return False
    with innermost_frames() as frames:
        return any(map(_compiles, frames.values()))


def _compiles(frame: Any) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_CONVERTS):
            return True
        # The compiled code runs in other functions of the same file.
        if code.co_filename.endswith(_COMPILES) and "compile" in code.co_name:
            return True
        frame = frame.f_back
    return False


def _issued() -> Iterator[tuple[str, int]]:
    """Yield each process group's name and its last collective's number."""
    names: set[str] = set()
    for ranks, number in _issued_by_group():
        yield _unique(_ranks(sorted(ranks)), names), number


def _issued_by_group() -> Iterator[tuple[Iterable[int], int]]:
    """Yield each process group's ranks and its last collective's number. Yields nothing if torch does not provide it."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    try:
        for group, ranks in list(world.pg_group_ranks.items())[:MAX_GROUPS] if world is not None else ():
            if (number := collectives_of(group)) is not None:
                yield ranks, number
    except Exception:  # noqa: BLE001  these are torch's internals, which differ between versions
        return


def all_issued() -> int:
    """Return the number of collectives that this rank has issued in all groups; takes about 1 us a group."""
    return sum(number for _, number in _issued_by_group())


def collectives_of(group: Any) -> int | None:
    """Return the number of a group's last collective; takes about 1 us. Collectives of all its backends count."""
    # torch/csrc/distributed/c10d/ProcessGroup.hpp `getSequenceNumberForGroup`, 2.0 to 2.14: gloo and nccl have it.
    ask = getattr(group, "_get_sequence_number_for_group", None)
    try:
        return int(ask()) if ask is not None else None
    except RuntimeError:  # the backend has none
        return None


def _ranks(ranks: list[int]) -> str:
    """Return a group's name, made of its ranks: 0-3,8. The name is the same on all of them."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    name = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 11]}+{zlib.crc32(name.encode())}"


def _unique(name: str, taken: set[str]) -> str:
    """Return a unique name; groups of the same ranks are numbered in creation order, the same on all ranks."""
    number = next(n for n in range(1, MAX_GROUPS + 1) if (name if n == 1 else f"{name}#{n}") not in taken)
    unique = name if number == 1 else f"{name}#{number}"
    taken.add(unique)
    return unique
