"""The requests to an agent, and its answers.

The configuration comes with the agent, and requests over its control socket, one JSON object per line. An agent checks what
it reads; of the answer of another version, the tool takes only what `hookd/target/remote/control.py` promises for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

from hookd.errors import ErrorAnswer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Caller(TypedDict):
    """A process that asks for something, according to the kernel."""

    uid: int
    pid: int


class Source(TypedDict, total=False):
    """Where the code of a plugin comes from; empty if the target's own environment has it."""

    version: str
    sha256: str
    origin: str
    """Where it was found: a distribution or a directory."""


class PluginConfig(Source, total=False):
    """A plugin to load."""

    name: str
    entry: str
    """`MODULE:CLASS`; absent if the target's own environment is to be searched."""
    options: dict[str, str]
    by_name: bool
    """Whether the user has named it, instead of getting it by default."""


class AgentConfig(TypedDict, total=False):
    """The configuration with which an agent starts."""

    method: Literal["attach", "run", "start", "test"]
    run: str | None
    """The label; None to derive it from the environment."""
    rank: int | None
    """The label; None to derive it from torch.distributed or the environment."""
    plugins: list[PluginConfig]
    lease_s: float | None
    """How long the agent stays after its last holder is gone, in seconds; None: until it is detached."""
    budget: float
    """The share of a step's time that observers may take."""
    detail: str
    """`auto` or `all`: which modules are exported."""
    by: Caller
    """The user and process that attach."""
    token: str
    directory: str
    """Under `hookd run`, the directory of the payload."""


class Message(TypedDict):
    """The request to the stub in a process, which starts the agent."""

    config: AgentConfig
    timeout_s: float
    """How long to wait for torch to be imported."""
    wait_s: float
    """How long to wait until the tool has seen the answer."""
    only_trainers: bool
    """Whether to refuse a data loader's worker."""


class Started(TypedDict, total=False):
    """The answer of the stub."""

    ok: bool
    """Whether the agent has started. If not, the rest is the error."""
    kind: str
    """The name of its class."""
    reason: str
    message: str
    hint: str


class Request(TypedDict, total=False):
    """A request on the control socket. Each operation has some of the keys."""

    op: str
    plugin: PluginConfig
    """To load or reload."""
    sources: Mapping[str, str | bytes]
    """By path, the source of a plugin to load or reload."""
    name: str
    """Of the plugin to unload or configure."""
    options: dict[str, str]
    mark: int | None
    """The boundary at which the ranks change together."""
    timeout: float
    """Of a detach, in seconds."""
    seconds: float
    """Of a lease."""
    begin: bool
    """Of a snapshot: whether to begin again."""
    expression: str
    limit_s: float
    """Of an evaluation."""
    by: Caller
    """The client for whom a daemon asks."""
    number: int
    """Of an evaluation."""
    steps: int
    """Of a trace."""
    max_bytes: int
    """Of a trace."""


class PluginStatus(Source):
    """A plugin of an agent."""

    name: str
    state: str
    """`active`, `probation`, `quarantined`, `disabled` or `waiting`."""
    mutates: bool
    """Whether it may change the training."""
    errors: int
    last_error: str
    interval: int
    """Its sampled hooks are called once in so many steps."""
    options: dict[str, str]
    """The options that the user gave."""
    by_name: bool
    """Whether the user has named it."""
    spent_s: float
    """Seconds that its hooks have taken."""


class ChangeStatus(TypedDict):
    """The last change of a plugin that changes the training."""

    name: str
    """Of the plugin."""
    kind: str
    """`load`, `unload`, `reload` or `configure`."""
    state: str
    """`prepared`, `armed`, `done` or `aborted`."""
    at: int | None
    """The boundary at which it took place."""
    step: str
    """The number of that step, in words."""


class Progress(TypedDict):
    """The progress of a rank, which the tool needs to change all ranks together."""

    change: ChangeStatus | None
    marks: list[int]
    """The boundaries that the rank has passed last."""
    span_s: float
    """The seconds in which it has passed them."""


class AgentStatus(Progress):
    """An agent."""

    version: str
    state: str
    """`running` or `detaching`."""
    pid: int
    """As the target sees it."""
    step: int
    """Steps done since the attach."""
    step_offset: int | None
    """Steps done before the attach; None if that is unknown."""
    plugins: list[PluginStatus]
    modules: int
    why_patched: str
    """Why calls are not entered in C; empty if they are."""
    leases: int
    holders: list[int]
    """The pids of the processes that hold a lease, as the target sees them; 0 for one in another PID namespace."""
    age_s: float
    torch: Sequence[tuple[str, bool, str]]
    """The parts of torch that hookd uses: name, whether it is as needed, and what was found."""


class Changed(Source, total=False):
    """The answer to a change of a plugin."""

    state: Literal["done", "prepared"]
    """`prepared`: it changes the training, and waits to be armed."""
    ranks: int
    """If it is prepared, the number of ranks of the job."""
    rank: int
    options: dict[str, str]
    """After a `configure`, the options that the user has given so far."""


class Detached(TypedDict):
    """The outcome of a detach."""

    restored: str | None
    """`identity` (nn.Module.__call__ is the original), `pass-through` (other code has patched on top of hookd's) or `pending`
    (a call is still running); None if the agent was gone."""
    residue: list[str]
    """Changes that could not be undone, in words."""


class TraceFailure(ErrorAnswer):
    """Why there is no trace."""

    kind: str
    """The name of the error's class."""


class TraceState(TypedDict):
    """The state of a trace."""

    state: str
    """`idle`, `waiting`, `tracing`, `saving`, `done` or `failed`."""
    steps: int
    """Steps done."""
    first: int
    """Number of the first of them."""
    fd: int
    """Descriptor of the file, in the target; -1 if there is none."""
    bytes: int
    """Of the file."""
    pause_s: float
    """How long torch's profiler has blocked the training, in seconds."""
    failure: TraceFailure | None
    all_threads: bool
    """Whether it shows all threads."""


EvaluationResult = Literal["running", "done", "raised", "interrupted"]


class EvaluationState(TypedDict, total=False):
    """The state of an evaluation."""

    state: EvaluationResult
    seconds: float
    type: str
    """Of the result or the error."""
    result: str
    """The result as text."""
    value: bool | float | str | None
    """The result, if JSON can represent it."""
    is_cut: bool
    """Whether `result` is truncated."""
    traceback: str
    frames: list[str]
    """Where it is, if it runs too long: innermost first."""
    is_given_up: bool
    """Whether it did not end when it was interrupted."""
