"""Reference of the hooks that a daemon plugin can implement.

A daemon plugin sees the metrics of all ranks together, and never touches a target:

    from hookd.serving import DaemonPlugin, hookimpl

    class Spread(DaemonPlugin):
        name = "spread"

        @hookimpl
        def collect(self, run, ranks, metrics):
            steps = [rank.value("hookd_steps_total") or 0 for rank in ranks]
            metrics.gauge("steps", "Steps between the first and the last rank.", max(steps) - min(steps))

Rules for all hooks:
- Each plugin has its own thread, in which its hooks are called, one at a time; `register_commands` is called in the process of
  the command. A hook may block and do I/O. Nothing waits for it: a scrape serves the last values from `collect`, and the event
  loop goes on.
- A hook that exceeds its time limit is an error. Errors are counted (`hookd_daemon_plugin_errors_total`). After ten errors, or one
  timeout, the plugin is quarantined. It is tried again, on probation, after one minute, then after two, and so on.
- The daemon never imports torch, and refuses a daemon plugin that does. Keep it in a module apart from the plugin in the target.
- Values passed to hooks come from the targets: do not trust text in them.
- Arguments have no defaults, as in `hookd.api.hookspecs`; a hook takes any subset of them, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hookd._pluggy import HookspecMarker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import click

    from hookd.serving import Metrics, Panel, Reading

hookspec = HookspecMarker("hookd_daemon")

TIMES_S: Mapping[str, float] = {
    "configure": 10.0, "target_attached": 10.0, "target_lost": 10.0, "collect": 5.0, "incident": 30.0,
    "web_panel": 5.0, "close": 2.0,
}  # fmt: skip
"""Time limit of each hook, in seconds."""


@hookspec
def configure(options: Mapping[str, str]) -> None:
    """Read the options, which are those in `[daemon_plugins.NAME]` of the configuration.

    Called once, at the daemon's start, before any other hook; at most 10 s. An exception here refuses the plugin;
    `hookd plugin list` and the log show its message.

        @hookimpl
        def configure(self, options):
            self.url = options["url"]
    """


@hookspec
def target_attached(target: Reading) -> None:
    """Handle a new target: one just attached, or one that the daemon found at its start.

    Called once per target, within about a second; at most 10 s.

        @hookimpl
        def target_attached(self, target):
            self.ranks[target.pid] = (target.run, target.rank)
    """


@hookspec
def target_lost(target: Reading, reason: str) -> None:
    """Handle the end of a target; `reason` is one word such as exited, killed or detached.

    `target` is the last reading. Called once per target, within about a second; at most 10 s.

        @hookimpl
        def target_lost(self, target, reason):
            self.ranks.pop(target.pid, None)
    """


@hookspec
def collect(run: str, ranks: Sequence[Reading], metrics: Metrics) -> None:
    """Compute metrics from all ranks of one run.

    Called for each run with a live target on this node, about once a second or every `every_s` of the plugin, if it keeps up; at
    most 5 s for all runs. A single process is a run of one rank. Values reported to `metrics` are served until the next call; if
    it is late, for at most 30 s more. The label `run` is added to all of them.

        @hookimpl
        def collect(self, run, ranks, metrics):
            for rank in ranks:
                loss = rank.value("hookd_mine_loss")
                if loss is not None:
                    metrics.gauge("loss", "Loss of each rank.", loss, {"rank": rank.rank})
    """


@hookspec
def incident(incident: Mapping[str, Any]) -> None:
    """Deliver an incident: a row as `hookd incidents --json` prints it.

    Called once for each incident, in order; at most 30 s. Undelivered incidents are delivered after a restart of the daemon.

        @hookimpl
        def incident(self, incident):
            if incident["kind"] == "nan":
                self.address.post({"text": incident["message"]})
    """


@hookspec
def web_panel(runs: Mapping[str, Sequence[Reading]]) -> Panel | None:
    """Return a table for the status page and for `/api/v1/panels`, or None.

    Called about every 5 s; at most 5 s. Text, numbers and None are shown as they are; text is never interpreted as HTML.

        @hookimpl
        def web_panel(self, runs):
            rows = [(run, len(ranks)) for run, ranks in runs.items()]
            return Panel("Ranks", ("run", "ranks"), rows)
    """


@hookspec
def register_commands() -> Sequence[click.Command]:  # type: ignore[empty-body]
    """Return additional commands for `hookd`, which its help lists after its own.

    Called in the process of the command that the user has typed, and only for `hookd --help` or a word that is not one of
    hookd's own commands. There is no daemon in that process, and `configure` is not called. An exception is reported on stderr,
    and affects nothing else.

        @hookimpl
        def register_commands(self):
            return [spread]
    """


@hookspec
def close() -> None:
    """Release all resources; called once, when the daemon ends, at most 2 s.

    @hookimpl
    def close(self):
        self.file.close()
    """


HOOKS = tuple(name for name, value in list(globals().items()) if hasattr(value, "hookd_daemon_spec"))
"""Names of all hooks of a daemon plugin."""
