"""The request to a replay and its answer; `hookd replay --json` prints `Replayed`."""

from __future__ import annotations

from typing import Any, TypedDict, final


class Request(TypedDict):
    """The request to replay a bundle."""

    bundle: str
    """Path of the directory."""
    source: str | None
    """Path of the training script, if its classes may be used."""
    allow: list[str]
    """Modules that may be imported."""
    device: str | None
    """Where to run; None for the recorded device if there is one, else the CPU."""


class Count(TypedDict):
    """The values of a tensor."""

    shape: list[int]
    dtype: str
    elements: int
    nan_count: int
    inf_count: int
    is_bad: bool
    """Whether it has a NaN or an infinity; `-inf` does not count if it is taken for a mask."""


class NamedCount(Count):
    """The values of a tensor with a name."""

    name: str


class CallSite(TypedDict):
    """Where an operation was called."""

    module: str
    """The innermost module inside the replayed one; `(itself)` for that."""
    is_backward: bool
    stack: list[str]
    """Lines of Python, the innermost last."""


class FirstBad(CallSite, Count):
    """The first operation that made a bad value of good inputs, and what it made."""

    operation: str


class Outcome(TypedDict):
    """The outcome of a replay, without the judgement."""

    module: str
    """The module of the call, as in the incident; as `where` and `kind`."""
    where: str
    kind: str
    step: Any
    inputs_changed: Any
    """Whether the call had changed its inputs in place; null if that is unknown."""
    torch: str
    """The version of the replay."""
    made_by: dict[str, str]
    """What made the bundle: versions, run, rank, pid and time."""
    device: str
    inputs: list[NamedCount]
    parameters: list[NamedCount]
    """Bad parameters and buffers."""
    outputs: list[NamedCount]
    recorded: list[NamedCount]
    """The outputs in the bundle."""
    gradients: list[NamedCount]
    """Bad gradients of parameters."""
    raised: str | None
    """The error of the call; null if it returned."""
    is_bit_equal: bool
    """Whether the outputs are the recorded ones, bit for bit."""
    is_output_known: bool
    """Whether the bundle has outputs."""
    is_state_known: bool
    """Whether the bundle has the state of the random number generators."""
    first: FirstBad | None
    notes: list[str]
    """What is missing in the bundle."""


ModuleClass = TypedDict("ModuleClass", {"class": str})


class JudgedOutcome(Outcome, ModuleClass):
    """The outcome of a replay, with the `class` of the module and whether the bad value came again."""

    is_reproduced: bool
    """Whether the place that the incident names is bad again."""


class Replayed(JudgedOutcome, total=False):
    """A replay."""

    bundle: str
    """Path of the directory."""
    reason: str
    """`raised` or `not-reproduced`; absent if it was reproduced."""


class Words(TypedDict):
    """A replay in words, for a person."""

    heading: list[str]
    rows: list[list[str]]
    """Of the table of tensors."""
    conclusion: list[str]
    stack: list[str]
    """Of the first bad operation, the innermost line last."""


@final
class Answer(Replayed, total=False):
    """The answer of the process of a replay."""

    words: Words
    """For the terminal; `--json` does not print them."""
