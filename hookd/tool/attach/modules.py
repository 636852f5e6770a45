"""Fetch the current models of an agent in portions, and sum up their sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hookd.errors import ControlError
from hookd.tool.attach.control import Control, foreign

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hookd.wire.model import Models, ModuleDescription, Totals

MOST = 100_000
"""Limit on the number of modules."""
PATIENCE_S = 10.0
"""Timeout of one portion: the agent's thread needs the GIL for a few milliseconds."""
_TEXTS = ("name", "class", "home", "seen")
_SIZES = ("elements", "bytes")


def snapshot(pid: int, most: int = MOST) -> Models:
    """Return the models of the agent in process `pid`.

    Returns:
        `modules`: see `hookd.target.modeltree.snapshot.SnapshotCursor.row`; `totals`: see `totals`; `is_cut`: there are more than `most`.

    Raises:
        HookdError: there is no agent, it does not answer, or its answer is malformed.
    """
    try:
        return _snapshot(pid, most)
    except ControlError as error:
        if error.reason != "gone":
            raise
        hint = f"`hookd stack {pid}` shows where it is."
        raise ControlError(error.message, reason=error.reason, hint=hint) from error


def _snapshot(pid: int, most: int) -> Models:
    rows: list[ModuleDescription] = []
    with Control.connect(pid) as control:
        answer = control.request("snapshot", begin=True, timeout_s=PATIENCE_S)
        while True:
            rows += _checked(answer, pid)
            if answer.get("is_over") is True or len(rows) >= most:
                break
            answer = control.request("snapshot", timeout_s=PATIENCE_S)
    is_cut = len(rows) > most or answer.get("is_over") is not True
    return {"pid": pid, "modules": rows[:most], "totals": totals(rows[:most]), "is_cut": is_cut}


def totals(modules: Iterable[ModuleDescription]) -> Totals:
    """Return the total sizes. A tensor that several modules share counts once.

    Returns:
        `modules`: their number; `parameters`, `trainable` and `buffers`: elements; `bytes` of parameters and buffers; `by`: the
        bytes of each dtype on each device, a list of `{"dtype", "device", "kind", "elements", "bytes"}`; `unknown`: the number
        of tensors without a known size.
    """
    sums: Totals = {"modules": 0, "parameters": 0, "trainable": 0, "buffers": 0, "bytes": 0, "by": [], "unknown": 0}
    by: dict[tuple[str, str, str], list[int]] = {}
    for module in modules:
        sums["modules"] += 1
        for kind in ("parameters", "buffers"):
            for tensor in module[kind]:
                if "same_as" in tensor:
                    continue
                elements, size = tensor.get("elements"), tensor.get("bytes")
                if elements is None or size is None:
                    sums["unknown"] += 1
                    continue
                sums[kind] += elements
                sums["bytes"] += size
                if kind == "parameters" and tensor.get("requires_grad"):
                    sums["trainable"] += elements
                share = by.setdefault((str(tensor.get("dtype")), str(tensor.get("device")), kind), [0, 0])
                share[0], share[1] = share[0] + elements, share[1] + size
    sums["by"] = [
        {"dtype": dtype, "device": device, "kind": kind, "elements": elements, "bytes": size}
        for (dtype, device, kind), (elements, size) in sorted(by.items())
    ]
    return sums


def _checked(answer: Mapping[str, object], pid: int) -> Iterator[ModuleDescription]:
    """Yield the modules of an answer, after checking their format."""
    rows = answer.get("modules")
    # An empty answer that is not the last could be repeated forever.
    if not isinstance(rows, list) or not (rows or answer.get("is_over") is True):
        raise foreign(pid)
    for row in rows:
        if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in _TEXTS):
            raise foreign(pid)
        lists = [row.get(key) for key in ("parameters", "buffers", "hooks", "plugins")]
        if not all(isinstance(value, list) for value in lists):
            raise foreign(pid)
        tensors = [*row["parameters"], *row["buffers"]]
        if not all(isinstance(entry, dict) for entry in (*tensors, *row["hooks"])):
            raise foreign(pid)
        if any(not _is_size(tensor.get(key)) for tensor in tensors for key in _SIZES):
            raise foreign(pid)
        yield cast("ModuleDescription", row)


def _is_size(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63)
