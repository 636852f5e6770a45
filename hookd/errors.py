"""Exceptions of hookd, each with a machine-readable reason and a hint for the user.

HookdError                    exit 1
+-- UsageError                exit 2   the command line or the arguments are wrong
|   +-- ConfigError                    an option, a file or an environment variable is wrong
|   +-- PluginError                    a plugin cannot be loaded as it is
+-- DaemonNotRunning          exit 3   nothing answers on the control socket
+-- DaemonSilent              exit 1   a daemon is there, but does not answer in time
+-- NoSuchTarget              exit 4   no such process, or it has no agent
+-- PermissionDenied          exit 5   the kernel, the owner or a policy refuses
+-- TargetUnsupported         exit 6   hookd cannot work in this process
+-- AttachError               exit 1   tried and failed: timeout, stopped, traced, zombie, died, blocked
+-- PageError                 exit 1   the page of a target cannot be created or trusted
+-- ControlError              exit 1   the agent refused a request, or stopped answering
TrainingError                          raised by a plugin for the training code itself; not a HookdError
"""

from __future__ import annotations

from typing import TypedDict


class ErrorAnswer(TypedDict):
    """An error, as `--json` and the daemon print it."""

    error: str
    """What failed, for which process or plugin."""
    reason: str
    """A stable word; docs/troubleshooting.md has all of them."""
    hint: str
    """What the user can do; empty if nothing helps."""
    exit_code: int
    """Of the command."""


class HookdError(Exception):
    """Base class of all exceptions that hookd raises on purpose.

    Args:
        message: what failed, for which pid or plugin.
        reason: a stable word for scripts (`--json` prints it).
        hint: what the user can do; empty when nothing helps.
    """

    exit_code = 1
    reason = "error"

    def __init__(self, message: str, *, reason: str | None = None, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason if reason is not None else type(self).reason
        self.hint = hint

    def as_json(self) -> ErrorAnswer:
        """Return the error as `--json` and the daemon print it."""
        return {"error": self.message, "reason": self.reason, "hint": self.hint, "exit_code": self.exit_code}

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with reason and hint: the injector helper sends its error over a pipe."""
        return (_rebuild, (type(self), self.message, self.reason, self.hint))


def rebuild(kind: object, message: object, reason: object, hint: object, default: type[HookdError]) -> HookdError:
    """Return an error that another process has serialized; of class `default` if `kind` is not a class of this module."""
    named = globals().get(str(kind))
    cls = named if isinstance(named, type) and issubclass(named, HookdError) else default
    return cls(str(message), reason=str(reason), hint=str(hint))


def _rebuild(kind: type[HookdError], message: str, reason: str, hint: str) -> HookdError:
    return kind(message, reason=reason, hint=hint)


class UsageError(HookdError):
    """The command line or the arguments of a call are wrong."""

    exit_code = 2
    reason = "usage"


class ConfigError(UsageError):
    """An option, a configuration file or an environment variable is wrong."""

    reason = "config"


class PluginError(UsageError):
    """A plugin cannot be loaded or configured as it is."""

    reason = "plugin"


class DaemonNotRunning(HookdError):  # noqa: N818 - the name states the fact
    """Nothing answers on the daemon's control socket."""

    exit_code = 3
    reason = "daemon-not-running"


class DaemonSilent(HookdError):  # noqa: N818
    """A daemon is there, but does not answer in time: it is stopped or hangs."""

    reason = "silent"


class NoSuchTarget(HookdError):  # noqa: N818
    """There is no such process, or it has no agent."""

    exit_code = 4
    reason = "no-such-process"


class PermissionDenied(HookdError):  # noqa: N818
    """The kernel, the owner or a policy refuses."""

    exit_code = 5
    reason = "permission-denied"


class TargetUnsupported(HookdError):  # noqa: N818
    """hookd cannot work in this process, and nothing the user does changes that."""

    exit_code = 6
    reason = "unsupported"


class AttachError(HookdError):
    """The attach was tried and failed; the reason names the cause."""

    reason = "attach-failed"


class PageError(HookdError):
    """The page of a target cannot be created, or must not be trusted."""

    reason = "page"


class ControlError(HookdError):
    """The agent refused a request, or stopped answering."""

    reason = "control"


class TrainingError(Exception):
    """Exception that a plugin with `mutates = True` raises in a hook for the training code; only this one propagates."""


def several_ranks(name: str, world_size: int, hint: str = "") -> PluginError:
    """Return the error for a change of the training on only one rank of several."""
    return PluginError(
        f"{name}: this job has {world_size} ranks, and a change of the training must begin on all of them at the same step",
        reason="several-ranks",
        hint=hint
        or f"Attach to all of its ranks at once (--tree), or to each and then `hookd plugin enable PID {name}`.",
    )


def worded(error: BaseException) -> str:
    """Return the class and the message of an exception, only the class if its `__str__` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except (Exception, SystemExit):  # noqa: BLE001  `__str__` may be anyone's code
        return type(error).__name__
