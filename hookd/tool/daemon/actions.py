"""Operations on targets: attach, detach, change plugins, hold leases. Blocking; run in threads."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookd.errors import HookdError, NoSuchTarget, UsageError
from hookd.tool.attach import AttachRequest, Control, attach, detach, discover, payload
from hookd.tool.attach.change import change, enable_together
from hookd.tool.config import PluginSpec
from hookd.tool.daemon import audit
from hookd.tool.daemon.fleet.identity import Identity
from hookd.tool.linux.accounts import TimeLimit, uid_of
from hookd.tool.linux.owner import user_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hookd.errors import ErrorAnswer
    from hookd.tool.config import ServeConfig
    from hookd.tool.daemon.fleet.fleet import Fleet
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.tool.daemon.metrics.collector import AttachCounter
    from hookd.wire.agent import Caller
    from hookd.wire.answer import Attached, Change, ChangedTarget, DetachedTarget
    from hookd.wire.target import ErrorRow

ORPHAN_TIMEOUT_S = 2.0
"""Timeout for asking an agent how many leases are open on it."""
LONGEST_S = 86400.0
"""Largest `timeout_s` that a request may ask for."""
YOUNG_S = 10.0
"""An agent younger than this may still be about to get its lease."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Order:
    """The parameters of one attach.

    Attributes:
        plugins: plugins to load; None for the configured ones.
        timeout_s: timeout of the attach, in seconds.
        keep: whether the agent stays when nobody holds a lease on it.
        run: the run label; None to derive it from the target.
        force: whether to also try methods that may disturb a target that hangs or is short of space.
        plugin_dirs: plugin directories in addition to the configured ones.
        only_trainers: whether to refuse a process that turns out to be a data loader worker.
    """

    plugins: tuple[PluginSpec, ...] | None = None
    timeout_s: float = 10.0
    keep: bool = False
    run: str | None = None
    force: bool = False
    plugin_dirs: tuple[Path, ...] = ()
    only_trainers: bool = False

    @classmethod
    def from_json(cls, body: Mapping[str, object]) -> Order:
        """Read the body of `POST /v1/attach`.

        Raises:
            UsageError: a key is unknown or has the wrong type.
        """
        kinds: dict[str, type | tuple[type, ...]] = {
            "timeout_s": (int, float),
            "keep": bool,
            "force": bool,
            "only_trainers": bool,
            "run": str,
            "plugins": list,
            "plugin_dirs": list,
        }
        values: dict[str, Any] = {key: value for key, value in body.items() if key != "pid" and value is not None}
        for key, value in values.items():
            if key not in kinds or not isinstance(value, kinds[key]) or isinstance(value, bool) != (kinds[key] is bool):
                raise UsageError(f"the request's '{key}' is unknown or has the wrong type", reason="bad-request")
        if "timeout_s" in values:
            values["timeout_s"] = read_timeout(values)
        if "plugins" in values:
            values["plugins"] = tuple(PluginSpec.from_json(item) for item in values["plugins"])
        values["plugin_dirs"] = tuple(Path(str(item)) for item in values.get("plugin_dirs", ()))
        return cls(**values)


class Actions:
    """Changes targets and holds the leases on their agents.

    Args:
        lease_s: how long an agent attached here stays without a lease, in seconds.
    """

    def __init__(self, fleet: Fleet, attach_counter: AttachCounter, config: ServeConfig, lease_s: float) -> None:
        self._fleet = fleet
        self._attach_counter = attach_counter
        self._config = config
        self._lease_s = lease_s
        self._busy: set[int] = set()
        self._undecided: list[Target] = []
        self._idle = threading.Condition()

    def attach(self, pid: int, order: Order, by: Caller | None = None) -> Attached:
        """Attach to a process, hold its agent and serve it.

        Args:
            pid: pid of the process.
            order: parameters of the attach.
            by: the caller according to the kernel, `{"uid", "pid"}`; None for a rule of the configuration.

        Raises:
            HookdError: the attach failed; the process continues as before.
        """
        specs = self._config.plugins if order.plugins is None else order.plugins
        audit.require_allowed(self._config, pid, [spec.name for spec in specs], order.plugin_dirs, by)
        self._fleet.require_room(pid)
        # A user's attach waits for one by rule in progress.
        with self._alone(pid, 0.0 if by is None else order.timeout_s):
            try:
                result = attach(pid, self._request(pid, order))
            except HookdError as exc:
                self._attach_counter.count(exc.reason)
                raise
            self._fleet.adopt(pid)
            # Counted when it is served, so that whoever waits for the count finds it.
            self._attach_counter.count("ok", None if result.method == "existing" else result.pause_s)
            target = self._fleet.get(pid)
            if not order.keep:
                self.hold(target)
        return {
            "pid": pid,
            "method": result.method,
            "pause_s": result.pause_s,
            "wall_s": result.wall_s,
            "run": target.claim.run,
            "rank": target.claim.rank,
            "user": user_name(target.claim.uid),
            "state": target.state,
            "control": str(result.control),
            "plugins": list(result.loaded),
            "added": list(result.added),
            "holders": list(result.holders),
            "replaced": result.replaced,
            "payload": result.payload,
            "carried": dict(result.carried),
            "unproven": result.untested,
            "identity": result.identity,
        }

    def _request(self, pid: int, order: Order) -> AttachRequest:
        config = self._config
        plugins = config.plugins if order.plugins is None else order.plugins
        return AttachRequest(
            plugins=tuple(map(config.with_options, plugins)),
            timeout_s=order.timeout_s,
            lease_s=None if order.keep else self._lease_s,
            run=order.run if order.run is not None else self._other_run(pid),
            force=order.force,
            only_trainers=order.only_trainers,
            plugin_dirs=(*order.plugin_dirs, *config.plugin_dirs),
            budget=config.budget,
            detail=config.detail,
        )

    def _other_run(self, pid: int) -> str | None:
        """Return the run name to store in the page if another job already uses the given one; None otherwise.

        Stored in the page, the name outlives this daemon. Processes with the same parent may be ranks of one job that
        identify themselves later, so their agents decide.
        """
        identity = Identity.of_process(pid)
        if not identity.is_named:
            return None
        if any(other.ended is None and other.identity.ppid == identity.ppid for other in self._fleet.targets()):
            return None
        run = self._fleet.claim(identity, pid).run
        return None if run == identity.run else run

    def hold(self, target: Target) -> None:
        """Open a lease on a target's agent unless there is one; log a refusal.

        Agents of `hookd run` and `hookd.start()` belong to their process; those attached with `--keep` need no lease.
        """
        identity = target.identity
        if target.lease is not None or target.ended is not None or identity.method != "attach" or identity.keep:
            return
        try:
            control = Control.connect(target.pid)
            control.request("lease", seconds=self._lease_s)
        except (HookdError, OSError) as exc:
            _log.warning("the daemon has no lease on the agent in process %d, which may leave: %s", target.pid, exc)
            return
        if not target.take_lease(control):
            control.close()

    def adopt_orphans(self, new: Iterable[Target]) -> None:
        """Open leases on agents that nobody holds, such as an earlier daemon's. Called repeatedly, from one thread at a time.

        An agent held by a foreground attach is skipped: Ctrl-C there must detach even while this daemon serves. A young
        agent without a lease is checked again later, because the attacher takes its lease a moment after the attach.
        Each user's agents get at most ORPHAN_TIMEOUT_S plus one answer per call; the rest wait for the next call
        without delaying other users' agents.

        Args:
            new: targets that have not been checked before.
        """
        limit, undecided = TimeLimit(ORPHAN_TIMEOUT_S, time.monotonic), []
        for target in (*self._undecided, *new):
            owner = target.identity.uid
            if limit.is_over(owner):
                undecided.append(target)
                continue
            with limit.of(owner):
                if not self._is_decided(target):
                    undecided.append(target)
        self._undecided = undecided

    def _is_decided(self, target: Target) -> bool:
        """Hold the target's agent if it is an orphan; return False if it is too early to decide."""
        identity = target.identity
        if identity.method != "attach" or identity.keep or target.ended is not None or target.lease is not None:
            return True
        try:
            with Control.connect(target.pid, ORPHAN_TIMEOUT_S) as control:
                status = control.status()
        except HookdError as exc:
            if _has_agent(target.pid):
                _log.info("the agent in process %d is not taken over: %s", target.pid, exc)
            return True
        except OSError:  # on our side, such as no free descriptor
            return False
        except Exception:  # noqa: BLE001  one target must not keep the others from being adopted
            _log.exception("target %d is not taken over", target.pid)
            return True
        if status.get("leases") != 0:
            return True
        if _seconds(status.get("age_s")) < YOUNG_S:  # by the agent's monotonic clock: the wall clock may have been set
            return False
        self.hold(target)
        return True

    def is_held_by_others(self, target: Target) -> bool:
        """Whether another daemon also holds the agent; True if this one does not hold it."""
        if target.lease is None:
            return True
        leases = target.lease.request("status").get("leases")
        return isinstance(leases, int) and leases > 1

    def detach(self, pid: int, timeout_s: float = 10.0, by: Caller | None = None) -> DetachedTarget:
        """Detach a target's agent, whoever attached it.

        Args:
            pid: pid of the target.
            timeout_s: timeout in seconds.
            by: the caller according to the kernel; None for this daemon itself, which is not logged.

        Raises:
            NoSuchTarget: the process is not a target.
            HookdError: the agent could not be detached.
        """
        with self._alone(pid, timeout_s):  # an attach by rule may be about to finish
            user = user_name(uid_of(pid))
            answer = detach(pid, timeout_s)
            claim = None
            with contextlib.suppress(NoSuchTarget):
                target = self._fleet.get(pid)
                claim = target.claim
                target.release()
                self._fleet.leave(target)
        if by is not None:
            audit.detached(pid, user, claim, by)
        return {"pid": pid, "restored": answer.get("restored"), "residue": answer.get("residue", [])}

    def change_plugins(self, pid: int, body: Mapping[str, object], by: Caller | None = None) -> ChangedTarget:
        """Load, unload, reload or configure a plugin; `body` has the keys `op` and `plugin`.

        See `api.py` and `hookd.tool.attach.change`.

        Raises:
            HookdError: the agent refuses, or there is no such plugin.
        """
        op, spec, timeout_s = str(body.get("op")), PluginSpec.from_json(body.get("plugin")), read_timeout(body)
        directories = body.get("plugin_dirs", [])
        if not isinstance(directories, list):
            raise UsageError("the request's 'plugin_dirs' must be a list", reason="bad-request")
        if op == "load":
            spec = self._config.with_options(spec)
        more = tuple(Path(str(directory)) for directory in directories)
        if op != "unload":  # unloading is always allowed
            audit.require_allowed(self._config, pid, [spec.name], more, by)
        answer: ChangedTarget = {"pid": pid, **change(pid, op, spec, (*more, *self._config.plugin_dirs), timeout_s)}
        audit.changed(answer, op, spec.name, by)
        return answer

    def apart(self, order: Order) -> tuple[Order, tuple[PluginSpec, ...]]:
        """Split an order into one without the plugins that may change the training, and those plugins."""
        specs = self._config.plugins if order.plugins is None else order.plugins
        first, later = payload.apart(specs, (*order.plugin_dirs, *self._config.plugin_dirs))
        return replace(order, plugins=first), later

    def enable_together(self, results: Sequence[Attached | ErrorRow], spec: PluginSpec, order: Order) -> None:
        """Load a plugin that changes the training into all attached processes together; see `hookd.tool.attach.change`."""
        ourselves: Caller = {"uid": os.getuid(), "pid": os.getpid()}

        def enable(op: str, pid: int) -> Change | ErrorAnswer:
            try:
                audit.require_allowed(self._config, pid, [spec.name], order.plugin_dirs, ourselves)
                directories = (*order.plugin_dirs, *self._config.plugin_dirs)
                return change(pid, op, self._config.with_options(spec), directories, order.timeout_s)
            except HookdError as exc:
                return exc.as_json()

        enable_together(results, spec.name, enable)

    @contextlib.contextmanager
    def _alone(self, pid: int, wait_s: float = 0.0) -> Iterator[None]:
        """Serialize attaches and detaches of one process; wait up to `wait_s` for another one to finish."""
        with self._idle:
            if not self._idle.wait_for(lambda: pid not in self._busy, wait_s):
                raise HookdError(
                    f"process {pid} is being attached or detached right now", reason="busy", hint="Try again."
                )
            self._busy.add(pid)
        try:
            yield
        finally:
            with self._idle:
                self._busy.discard(pid)
                self._idle.notify_all()


def _has_agent(pid: int) -> bool:
    """Whether an agent is still in a process, as far as we can see."""
    try:
        return discover.identity(pid) is not None
    except NoSuchTarget:
        return False
    except (HookdError, OSError):  # it cannot be seen, or not be read
        return True


def read_timeout(body: Mapping[str, object], default: float = 10.0, longest_s: float = LONGEST_S) -> float:
    """Return the `timeout_s` of a request, in seconds.

    Raises:
        UsageError: it is not between 0 and `longest_s`. Python's JSON parser also accepts NaN and infinity.
    """
    value = body.get("timeout_s", default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= longest_s:
        raise UsageError(
            f"the request's 'timeout_s' must be a number above 0, up to {longest_s:g} s", reason="bad-request"
        )
    return float(value)


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.inf
