"""A daemon in the test's own process, with the real plugin host, view of targets and incident store.

Importing this module does not load the daemon; using it does. Neither loads torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING

import hookd
from hookd.errors import PluginError
from hookd.testing import values
from hookd.testing.incidents import StoredIncident
from hookd.testing.ranks import FakeRank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import click
    from click.testing import Result
    from typing_extensions import Self

    from hookd.serving import DaemonPlugin, ReportedFamily
    from hookd.testing.target import FakeTarget
    from hookd.testing.values import Sample
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.tool.daemon.incidents.receivers import FunctionReceiver
    from hookd.tool.daemon.plugins.discovery import AvailablePlugin
    from hookd.tool.daemon.plugins.rows import PanelRow, PluginHookError
    from hookd.tool.daemon.plugins.worker import PluginWorker

RUN = "train.py"
JOIN_S = 5.0
"""Seconds that the thread of a plugin may take to end."""


class FakeDaemon:
    """A daemon that hosts daemon plugins, each in its own thread, without serving a port or finding other targets.

    The daemon's periodic work, about once a second in `hookd serve`, is done only by `look()`. By the daemon's clock each
    look is 5 s after the last, so that every look includes the hooks that are called less often, such as panels.
    """

    def __init__(self) -> None:
        self._ends = contextlib.ExitStack()
        self._plugins: list[AvailablePlugin] = []
        self._workers: list[PluginWorker] = []
        self._receivers: list[FunctionReceiver] = []
        self._targets: dict[int, Target] = {}
        self._ranks: list[FakeRank] = []
        self._ahead_s = 0.0
        self._incident_count = 0

    # -- lifecycle

    def start(self, *plugins: type[DaemonPlugin] | str | Path, **options: object) -> Self:
        """Start with these plugins.

        Args:
            plugins: classes, names of installed plugins, or files, which are loaded as from a plugin directory.
            options: of the first plugin, as in `[daemon_plugins.NAME]`.

        Raises:
            PluginError: a plugin is refused. The message has your file and line, the hint has the traceback.
        """
        return self.begin([self._available(plugin) for plugin in plugins], options)

    def begin(self, plugins: Sequence[AvailablePlugin], options: Mapping[str, object]) -> Self:
        """Start with daemon plugins that were found already, see `start`."""
        from hookd.tool.config import ServeConfig
        from hookd.tool.daemon.fleet.fleet import Fleet
        from hookd.tool.daemon.incidents.store import IncidentStore
        from hookd.tool.daemon.metrics.collector import AttachCounter, FleetCollector
        from hookd.tool.daemon.metrics.selection import Limits
        from hookd.tool.daemon.plugins.host import Host
        from hookd.tool.daemon.plugins.worker import PluginWorker

        assert not self._plugins, "it was started already"
        config = ServeConfig()
        folder = self._ends.enter_context(tempfile.TemporaryDirectory())
        self._store = IncidentStore.open(Path(folder))
        self._ends.callback(self._store.close)
        self._fleet = Fleet(self._store, linger_s=config.linger_s, serves_tests=True, clock=self._now)
        self._ends.callback(self._fleet.close)
        texts = {key: str(value) for key, value in options.items()}
        self._plugins = list(plugins)
        self._workers = [
            PluginWorker(plugin, {} if number else texts, self._now) for number, plugin in enumerate(plugins)
        ]
        self._host = Host(self._workers, self._now)
        self._ends.callback(self._close_host)
        self._collector = FleetCollector(self._fleet, AttachCounter(), Limits.of(config), more=self._host.families)
        self._settle()
        self._require_accepted()
        self._receivers = self._host.receivers(self._store)
        for receiver in self._receivers:
            self._store.listen(receiver)
            self._ends.callback(receiver.close)
        return self

    def _require_accepted(self) -> None:
        refused = [worker for worker in self._workers if worker.state == "refused"]
        if refused:
            self.close()
            self._workers, self._plugins = [], []
            name, error = refused[0].name, refused[0].last_error
            # If the error was raised in hookd, the text already has the plugin's line.
            is_ours = error["where"].startswith(str(Path(hookd.__file__).parent))
            where = f" ({error['where']})" if error["where"] and not is_ours else ""
            text = error["text"].removeprefix(f"{name}: ")
            raise PluginError(f"{name}: {text}{where}", hint=error["traceback"])

    def _available(self, plugin: type[DaemonPlugin] | str | Path) -> AvailablePlugin:
        from hookd.tool.daemon.plugins import discovery

        if isinstance(plugin, type):
            return self._of_class(plugin)
        directories = [plugin.parent] if isinstance(plugin, Path) else []
        plugins, problems = discovery.find(directories, lambda name: isinstance(plugin, Path) or name == plugin)
        for available in plugins:
            if available.path == plugin or (available.path is None and available.name == plugin):
                module = available.source.entry.partition(":")[0]
                if available.path is not None and module not in sys.modules:
                    self._ends.callback(sys.modules.pop, module, None)
                return available
        raise problems[0] if problems else PluginError(f"there is no daemon plugin {str(plugin)!r}")

    def _of_class(self, plugin: type[DaemonPlugin]) -> AvailablePlugin:
        """Make a class of the test importable by the daemon."""
        from hookd.tool.attach.sources import Source
        from hookd.tool.daemon.plugins.discovery import AvailablePlugin

        home = f"hookd_testing_{plugin.name}_{id(self):x}"
        module = sys.modules[home] = types.ModuleType(home)
        self._ends.callback(sys.modules.pop, home, None)
        setattr(module, plugin.__name__, plugin)
        bases = [sys.modules.get(base.__module__) for base in plugin.__mro__]
        paths = {getattr(base, "__file__", None) for base in bases} - {None, sys.modules["hookd.serving"].__file__}
        files = {Path(str(path)).name: Path(str(path)).read_bytes() for path in paths}
        return AvailablePlugin(plugin.name, Source(plugin.name, f"{home}:{plugin.__name__}", files))

    def _now(self) -> float:
        return time.monotonic() + self._ahead_s

    def _settle(self) -> None:
        """Wait until every plugin has finished its hooks or is quarantined; slow ones are quarantined, as in the daemon."""
        while not all(worker.is_idle or worker.state in ("quarantined", "refused") for worker in self._workers) or any(
            self._store.undelivered(receiver.name, 1) for receiver in self._receivers
        ):
            for worker in self._workers:
                worker.poll()
            time.sleep(0.002)

    def stop_clean(self) -> None:
        """Close, if it is open, and check that no hook has raised.

        Raises:
            AssertionError: a hook has raised; the message has the tracebacks.
        """
        self.close()
        texts = [
            f"{error['plugin']}: {error['hook']}: {error['text']}\n{error['where']}\n{error['traceback']}"
            for error in self.last_errors
        ]
        assert not self.errors, f"hooks raised: {self.errors}\n" + "\n".join(dict.fromkeys(texts))

    def close(self) -> None:
        """Close the plugins, end the ranks, and release all resources."""
        self._ends.close()

    def _close_host(self) -> None:
        self._host.close()
        for worker in self._workers:
            worker._thread.join(JOIN_S if worker.is_idle else 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the daemon's work

    def ranks(self, count: int = 1, run: str = RUN) -> list[FakeRank]:
        """Attach to `count` more ranks of a run, and return them; the plugins see them from the next look on."""
        first = sum(rank.run == run for rank in self._ranks)
        ranks = [FakeRank(run, first + number, self._lose) for number in range(count)]
        for rank in ranks:
            self._ends.callback(rank.close)
            self._ranks.append(rank)
            self._add(rank.pid, rank.page.fd)
        return ranks

    def attach(self, target: FakeTarget) -> None:
        """Attach to a training in this process, and read what its plugins publish from its real page."""
        self._add(os.getpid(), target._agent._page.fd)

    def _add(self, pid: int, fd: int) -> None:
        from hookd.tool.linux import proc

        assert self._plugins, "call start() first"
        target = self._fleet._take(pid, os.dup(fd), proc.start_ticks(pid))
        assert target is not None, f"process {pid} has ended"
        self._targets[pid] = target

    def _lose(self, rank: FakeRank) -> None:
        self._fleet.lose(self._targets[rank.pid])

    def look(self, times: int = 1) -> None:
        """Run the daemon's periodic work `times` times, each time waiting until the plugins' hooks have returned."""
        from hookd.tool.daemon.plugins.host import PANEL_EVERY_S

        for _ in range(times):
            self._ahead_s += PANEL_EVERY_S
            self._fleet.poll()
            self._host.poll(self._fleet.targets())
            self._settle()

    def incident(self, kind: str, message: str, *, run: str = RUN, rank: str = "0", **fields: object) -> None:
        """Store an incident directly, and pass it to the plugins as a daemon does.

        `FakeRank.incident` writes one to the page of a rank instead.
        """
        self._incident_count += 1
        incident = {"seq": self._incident_count, "time": time.time(), "kind": kind, "message": message, **fields}
        self._store.add((os.getpid(), 0, 0), run, rank, [incident], owner=os.getuid())
        self._settle()

    def invoke(self, command: str, *words: str) -> Result:
        """Run a command that a plugin adds to `hookd`, in this process; its exceptions propagate.

        Args:
            command: its name.
            words: its arguments.

        Returns:
            The result of click's `CliRunner`, with `exit_code`, `output` and more.

        Raises:
            KeyError: there is no such command.
            PluginError: a plugin registers an object that is not a command, or uses the name of a command of hookd.
        """
        from click.testing import CliRunner

        return CliRunner().invoke(self.commands()[command], words, prog_name=f"hookd {command}", catch_exceptions=False)

    def commands(self) -> dict[str, click.Command]:
        """Return the click commands that the plugins add to `hookd`, by name.

        Raises:
            PluginError: see `invoke`.
        """
        from hookd.tool.cli import COMMANDS, extensions

        commands: dict[str, click.Command] = {}
        for plugin in self._plugins:
            if plugin.has("register_commands"):
                extensions.add(commands, plugin, COMMANDS)
        return commands

    # -- results

    def samples(self) -> list[Sample]:
        """Return name, labels and value of each series on `/metrics`: those of targets, plugins and the daemon."""
        return [
            (sample.name, sample.labels, sample.value)
            for family in self._collector.collect()
            for sample in family.samples
        ]

    def assert_metrics(self, expected: Mapping[str, object]) -> None:
        """Check values, as in `{'hookd_spread_steps{run="train.py"}': 2}`; see `hookd.testing.assert_metrics`."""
        values.assert_metrics(self.samples(), expected)

    def value(self, name: str, **labels: str) -> float:
        """Return the value of the only series with this name and these labels; it may have other labels too.

        Raises:
            KeyError: there is no such series, or more than one.
        """
        matching = [
            value
            for other, its_labels, value in self.samples()
            if other == name and labels.items() <= its_labels.items()
        ]
        if len(matching) != 1:
            raise KeyError(f"{len(matching)} series match {name} with {labels}, not 1")
        return matching[0]

    @property
    def panels(self) -> list[PanelRow]:
        """The panels, as `/api/v1/panels` returns them, each with plugin, title, columns and rows."""
        return self._host.panels()

    @property
    def panel(self) -> PanelRow:
        """The panel, if there is exactly one."""
        (panel,) = self.panels
        return panel

    @property
    def incidents(self) -> list[StoredIncident]:
        """All stored incidents, the oldest first."""
        return [StoredIncident.from_row(row) for row in self._fleet.incidents()[::-1]]

    def plugin(self, name: str) -> DaemonPlugin:
        """Return the running object of a plugin."""
        hooks = self._named(name).hooks
        plugin: DaemonPlugin = next(iter(hooks.values()))[0].__self__  # type: ignore[attr-defined]
        return plugin

    def hooks(self, name: str) -> list[str]:
        """Return the names of a plugin's hooks."""
        return list(self._named(name).hooks)

    def families(self, name: str) -> list[ReportedFamily]:
        """Return the metric families that a plugin returned last, separately for each run."""
        _, families = self._host._collected.get(name, (0.0, []))
        return [family for _, family in families]

    def state(self, name: str) -> str:
        """Return the state of a plugin, such as "active" or "quarantined"."""
        return self._named(name).state

    def _named(self, name: str) -> PluginWorker:
        return next(worker for worker in self._workers if worker.name == name)

    @property
    def errors(self) -> dict[tuple[str, str], int]:
        """Number of calls that raised, took too long or returned an invalid value, by plugin and hook."""
        return {
            (worker.name, hook): count for worker in self._workers for hook, count in worker.errors.items() if count
        }

    @property
    def last_errors(self) -> list[PluginHookError]:
        """The errors: plugin, hook and text, with the plugin's line (`where`) and the traceback."""
        return [{"plugin": worker.name, **error} for worker in self._workers for error in worker.last_errors]
