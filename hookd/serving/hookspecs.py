"""Every hook that the daemon half of a plugin can implement: the reference for its authors. Runs in the daemon.

A daemon half sees what the targets publish, all ranks together, and never touches one:

    from hookd.serving import DaemonPlugin, hookimpl

    class Spread(DaemonPlugin):
        name = "spread"

        @hookimpl
        def collect(self, run, ranks, metrics):
            steps = [rank.value("hookd_steps_total") or 0 for rank in ranks]
            metrics.gauge("steps", "Steps between the first and the last rank.", max(steps) - min(steps))

What holds for all of them:
- They are called in one thread of the plugin's own, one at a time; `register_commands` in the command that a person runs.
  A hook may wait and may do I/O. Nobody waits for it: a scrape serves what `collect` has told last, the event loop goes on.
- One that takes longer than its time is an error. Errors are counted (`hookd_daemon_plugin_errors_total`); ten of them,
  or one that takes too long, put the plugin aside: it comes back after a minute on probation, then after two, and so on.
- The daemon never imports torch: a module of the daemon half that does is refused. Keep the halves in modules of their own.
- What is passed is the targets' own word: text in it may be anything.
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
"""How long each hook may take, in seconds."""


@hookspec
def configure(options: Mapping[str, str]) -> None:
    """Read the options, which stand in `[daemon_plugins.NAME]`; once, before anything else.

    Raising here refuses the plugin; `hookd plugin list` and the log tell why. Once at the daemon's start, at most 10 s.

        @hookimpl
        def configure(self, options):
            self.url = options["url"]
    """


@hookspec
def target_attached(target: Reading) -> None:
    """Learn of a new target: just attached, or found by a daemon that has just started.

    Within about a second of it, once per target; at most 10 s.

        @hookimpl
        def target_attached(self, target):
            self.ranks[target.pid] = (target.run, target.rank)
    """


@hookspec
def target_lost(target: Reading, reason: str) -> None:
    """Learn of the end of a target: `reason` is one word such as exited, killed or detached.

    `target` is as it was seen last. Once per target, within about a second; at most 10 s.

        @hookimpl
        def target_lost(self, target, reason):
            self.ranks.pop(target.pid, None)
    """


@hookspec
def collect(run: str, ranks: Sequence[Reading], metrics: Metrics) -> None:
    """Make metrics out of what the ranks of one run say together.

    About once a second, or each `every_s` of the plugin, while it keeps up, for each run with a living target on this node;
    a single process is a run of one rank. At most 5 s for all runs. What is told to `metrics` is served until the next
    time, 30 s longer than that at most. The label `run` is added to all of it.

        @hookimpl
        def collect(self, run, ranks, metrics):
            for rank in ranks:
                loss = rank.value("hookd_mine_loss")
                if loss is not None:
                    metrics.gauge("loss", "Loss of each rank.", loss, {"rank": rank.rank})
    """


@hookspec
def incident(incident: Mapping[str, Any]) -> None:
    """Tell somebody of an incident: a row as `hookd incidents --json` prints it.

    Called once for each incident, in order, for at most 30 s. What has not been delivered is delivered after a restart of
    the daemon.

        @hookimpl
        def incident(self, incident):
            if incident["kind"] == "nan":
                self.address.post({"text": incident["message"]})
    """


@hookspec
def web_panel(runs: Mapping[str, Sequence[Reading]]) -> Panel | None:
    """Give a table for the status page and for `/api/v1/panels`; None for nothing.

    About every 5 s; at most 5 s. Text, numbers and None are shown as they are; nothing is taken for HTML.

        @hookimpl
        def web_panel(self, runs):
            rows = [(run, len(ranks)) for run, ranks in runs.items()]
            return Panel("Ranks", ("run", "ranks"), rows)
    """


@hookspec
def register_commands() -> Sequence[click.Command]:  # type: ignore[empty-body]
    """Give commands for `hookd`: they appear in its help, after its own.

    In the process of the command that a person has typed, and only where it is needed: for `hookd --help`, and for a word
    that is no command of hookd's own. There is no daemon around, and `configure` is not called. What raises here is told,
    and breaks nothing else.

        @hookimpl
        def register_commands(self):
            return [spread]
    """


@hookspec
def close() -> None:
    """Let go of everything; once, when the daemon ends. At most 2 s.

    @hookimpl
    def close(self):
        self.file.close()
    """
