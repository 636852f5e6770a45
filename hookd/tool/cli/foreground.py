"""`hookd attach` where no daemon runs: a daemon in the foreground, and its messages."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hookd.errors import HookdError
from hookd.tool.cli import address, output
from hookd.tool.cli import attach as words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hookd.tool.cli.options import Watch
    from hookd.tool.cli.targets import Selection
    from hookd.wire.answer import Attached, DetachedTarget
    from hookd.wire.target import ErrorRow, ServerStatus, TargetRow


def attach(chosen: Selection, watch: Watch, *, as_json: bool) -> int:
    """Attach, serve until Ctrl-C or the end of all targets, and detach.

    Returns the worst exit code of the attaches.

    Raises:
        HookdError: a plugin is unknown, or the addresses cannot be bound (nothing has been touched then).
    """
    from hookd.tool.attach import payload, target
    from hookd.tool.config import load
    from hookd.tool.daemon import log
    from hookd.tool.daemon.actions import Order
    from hookd.tool.daemon.embedded import attach_and_serve

    log.to_terminal()
    config = load({"listen": watch.listen}, os.environ)
    payload.build(watch.plugins, watch.plugin_dirs)
    pids = chosen.pids
    if len(pids) == 1:  # an address in use must not hide that this process cannot be attached to
        try:
            target.inspect(pids[0], is_forced=watch.force).memory.close()
        except HookdError as error:
            entry: ErrorRow = {"pid": pids[0], **error.as_json()}
            return words.finish([entry], as_json=as_json, say=words.attached_message, skipped=chosen.skipped)
    order = Order(
        plugins=watch.plugins or None,
        timeout_s=watch.timeout_s,
        keep=watch.keep,
        force=watch.force,
        plugin_dirs=watch.plugin_dirs,
        only_trainers=not chosen.is_named,
    )
    reporter = Reporter(chosen, watch, linger_s=config.linger_s, as_json=as_json)
    with address.explaining(config.listen, "attach"):
        attach_and_serve(config, pids, order, reporter)
    reporter.report_kept()
    return reporter.status


class Reporter:
    """Prints messages about events; the reporter of `attach_and_serve`.

    Args:
        chosen: the requested processes.
        watch: the options of the attach.
        linger_s: how long an ended target is served, in seconds.
        as_json: print the results of the attaches on stdout when all are complete.

    Attributes:
        status: the worst exit code of the attaches.
    """

    def __init__(self, chosen: Selection, watch: Watch, *, linger_s: float, as_json: bool) -> None:
        self.status = 0
        self._chosen = chosen
        self._linger_s = linger_s
        self._watch = watch
        self._as_json = as_json
        self._url = ""
        self._outcomes: Sequence[Attached | ErrorRow] = ()
        self._gone: set[int] = set()

    def serving(self, status: ServerStatus) -> None:
        """Print what the attach waits for, if it takes long."""
        self._url = status["url"]
        self._reminder = words.waiting(self._chosen.pids, self._watch.timeout_s)

    def attached(self, outcomes: Sequence[Attached | ErrorRow]) -> None:
        """Print the outcomes of the attaches, and where the metrics are."""
        self._reminder.cancel()
        self._outcomes = outcomes
        metrics = f"{self._url}/metrics"
        self.status = words.finish_attached(outcomes, self._chosen, as_json=self._as_json, metrics=metrics)
        agents = [outcome["identity"] for outcome in outcomes if "error" not in outcome]
        if agents:  # agents that belong to their process, or are kept, have no lease
            detaches = any(agent.get("method") == "attach" and not agent.get("keep") for agent in agents)
            output.say(f"metrics on {metrics}; Ctrl-C {'detaches' if detaches else 'ends this'}")

    def ended(self, target: TargetRow) -> None:
        """Print how a target has ended."""
        self._gone.add(target["pid"])
        output.say(self._ended(target))

    def detached(self, outcome: DetachedTarget | ErrorRow) -> None:
        """Print the outcome of a detach."""
        if "error" in outcome:
            output.complain(HookdError(outcome["error"], hint=outcome["hint"]))
        else:
            output.say(words.detached_message(outcome))

    def report_kept(self) -> None:
        """Print at the end which agents stay, because they are to be kept."""
        for entry in self._outcomes:
            if "error" in entry or entry["pid"] in self._gone:
                continue
            if self._watch.keep or entry["identity"].get("keep") is True:
                output.say(f"the agent stays in {entry['pid']}; `hookd detach {entry['pid']}` ends it")

    def _ended(self, row: TargetRow) -> str:
        if row["state"] == "detached":
            return f"process {row['pid']} was detached"
        if row["state"] in ("ended", "lost"):
            how = row["how"] or f"has ended ({row['reason']})"
            return f"process {row['pid']} {how}; its counters are served for {self._linger_s:g} s"
        return f"process {row['pid']}: its page cannot be trusted any more ({row['reason']})"
