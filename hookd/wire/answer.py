"""The answers of the daemon to attach, detach, a change of plugins and an evaluation; the commands print the same as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, final

if TYPE_CHECKING:
    from hookd.wire.agent import Source
    from hookd.wire.identity import Identity


class PluginRefused(TypedDict, total=False):
    """The error of a plugin that changes the training and was refused after the attach itself."""

    error: str
    reason: str
    hint: str
    exit_code: int


@final
class Attached(PluginRefused):
    """The outcome of an attach."""

    pid: int
    method: Literal["ptrace", "remote-debug", "existing"]
    """How the agent came: by a stop, without one, or it was there already."""
    pause_s: float
    """How long the main thread was stopped, in seconds."""
    wall_s: float
    """How long the attach took, in seconds."""
    run: str
    rank: str
    user: str
    """The owner of the process."""
    state: str
    """Of the target, as in TargetRow."""
    control: str
    """Path of the agent's control socket, as the daemon sees it."""
    plugins: list[str]
    """The plugins that are loaded now."""
    added: list[str]
    """The plugins that were added to an agent that was there already."""
    holders: list[int]
    """The processes that held such an agent before; 0 for one that is in another pid namespace."""
    replaced: str
    """The version of the older agent that was replaced; empty if there was none."""
    payload: str
    """The sha256 of the payload; empty if the agent was there already."""
    carried: dict[str, Source]
    """By plugin that was sent, the source of its code."""
    unproven: str
    """A message if Python or torch is newer than any version that hookd was tested with; else empty."""
    identity: Identity
    """The process, as the agent publishes it."""


class Left(TypedDict, total=False):
    """Of a target that its daemon did not detach."""

    left: str
    """Why."""


@final
class DetachedTarget(Left):
    """The outcome of a detach."""

    pid: int
    restored: str | None
    """`identity`: torch is as before the attach. `pass-through`: other code has patched on top of hookd, so an empty function stays
    below it. `pending`: torch is restored when the calls in flight have returned. None if the agent stays or was gone."""
    residue: list[str]
    """Changes that could not be undone, in words."""


class Change(TypedDict, total=False):
    """The outcome of a change of a target's plugins."""

    state: Literal["done", "pending"]
    """`pending`: the step at which it takes effect was not reached in time; it takes effect there."""
    ranks: dict[str, int]
    """By rank, the pid of each target that was changed."""
    step: dict[str, str]
    """By rank, the number of the step at which it took effect, in words."""
    options: dict[str, str]
    """After a `configure`, all options of the plugin that the user has given."""
    version: str
    """Of the plugin's source, if one was sent; as the next two."""
    sha256: str
    origin: str
    """Where it was found."""


@final
class ChangedTarget(Change):
    """The outcome of a change, and the target that was asked."""

    pid: int


class Evaluation(TypedDict, total=False):
    """The outcome of an evaluation."""

    state: Literal["done", "raised", "interrupted", "running"]
    """`running`: it did not end when it was interrupted, or the target no longer answers."""
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
    """If it raised."""
    frames: list[str]
    """If it is running, where it is: innermost first."""
    error: str
    """Why nothing is known of it."""


@final
class EvaluatedTarget(Evaluation):
    """The outcome of an evaluation, and the target in which it ran."""

    pid: int


class Version(TypedDict):
    """A daemon."""

    version: str
    pid: int
    protocol: int
    """Of its control socket."""
