"""Put the result of a replay into words, for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd_capture.bundle.result import Replayed, Words

_KINDS = {"nan": "NaN", "inf": "Inf"}


def words(result: Replayed) -> Words:
    """Return what `hookd replay` prints."""
    first = result["first"]
    return {
        "heading": list(_heading(result)),
        "rows": [list(row) for row in _rows(result)],
        "conclusion": list(_conclusion(result)),
        "stack": [] if first is None else first["stack"],
    }


def _heading(result: Replayed) -> Iterator[str]:
    made = result["made_by"]
    kind, where = _KINDS.get(result["kind"], result["kind"]), result["where"]
    yield f"{result['module']} ({result['class']}): {kind}, {where}, step {result['step']} of run {made.get('run')}"
    yield f"recorded with torch {made.get('torch')}, called again with torch {result['torch']} on {result['device']}"


def _rows(result: Replayed) -> Iterator[tuple[str, ...]]:
    """Yield the inputs, the outputs, and the recorded outputs."""
    titles = {
        "input": result["inputs"], "bad": result["parameters"], "output": result["outputs"],
        "recorded": result["recorded"], "gradient of": result["gradients"],
    }  # fmt: skip
    for title, tensors in titles.items():
        for tensor in tensors:
            shape = "x".join(map(str, tensor["shape"])) or "scalar"
            counts = tensor["elements"], tensor["nan_count"], tensor["inf_count"]
            yield (f"{title} {tensor['name']}", shape, tensor["dtype"], *map(str, counts))


def _conclusion(result: Replayed) -> Iterator[str]:
    """Yield lines that interpret the result."""
    for note in result["notes"]:
        yield f"note: {note}"
    if result["raised"]:
        yield f"the call raised {result['raised']}"
        yield "not reproduced"
        return
    first = result["first"]
    if first is not None:
        counts = f"{first['nan_count']} NaN and {first['inf_count']} Inf in {first['elements']}"
        yield f"first bad value: {first['operation']} in {first['module']}, {counts}; its inputs were good"
    if not result["is_output_known"]:
        yield "reproduced" if result["is_reproduced"] else "not reproduced"
        return
    same = "bit for bit what was recorded" if result["is_bit_equal"] else "not bit for bit what was recorded"
    if not result["is_bit_equal"] and not result["is_state_known"]:
        same += " (the state of the random number generators is not known)"
    yield f"{'reproduced' if result['is_reproduced'] else 'not reproduced'}; the output is {same}"
