"""The daemon's end of plugins in the test's own process: its real host of daemon halves, its real targets and store.

Importing this module loads nothing of the daemon; using it does, and never torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hookd
from hookd.errors import PluginError
from hookd.testing import values
from hookd.testing.ranks import FakeRank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from click.testing import Result
    from typing_extensions import Self

    from hookd.serving import DaemonPlugin, Told
    from hookd.testing.target import FakeTarget
    from hookd.testing.values import Sample
    from hookd.tool.daemon.fleet.targets import Target
    from hookd.tool.daemon.incidents.receivers import Caller
    from hookd.tool.daemon.plugins.discovery import Half
    from hookd.tool.daemon.plugins.worker import Hosted

RUN = "train.py"
JOIN_S = 5.0
"""How long the thread of a plugin may take to end."""


class FakeDaemon:
    """Daemon halves of plugins as a daemon hosts them, each in its thread; nothing is served, nobody else's is seen.

    What the daemon does about once a second is done by `look()`, and by nothing else; each look is 5 s after the one
    before by the daemon's clock, so that all that is asked for now and then is asked for in each.
    """

    def __init__(self) -> None:
        self._ends = contextlib.ExitStack()
        self._halves: list[Half] = []
        self._hosted: list[Hosted] = []
        self._callers: list[Caller] = []
        self._targets: dict[int, Target] = {}
        self._ranks: list[FakeRank] = []
        self._ahead_s = 0.0
        self._told = 0

    # -- life

    def start(self, *plugins: type[DaemonPlugin] | str | Path, **options: object) -> Self:
        """Start with these plugins; the options are those of the first.

        Args:
            plugins: classes, names of installed ones, or files, which are loaded as from a plugin directory.
            options: what stands in `[daemon_plugins.NAME]`.

        Raises:
            PluginError: one is refused; the message has the author's file and line, the hint the traceback.
        """
        return self.begin([self._half(plugin) for plugin in plugins], options)

    def begin(self, halves: Sequence[Half], options: Mapping[str, object]) -> Self:
        """Start as `start` does, with halves that were found already."""
        from hookd.tool.config import ServeConfig
        from hookd.tool.daemon.fleet.fleet import Fleet
        from hookd.tool.daemon.incidents.store import IncidentStore
        from hookd.tool.daemon.metrics.collector import FleetCollector, Tally
        from hookd.tool.daemon.metrics.selection import Limits
        from hookd.tool.daemon.plugins.host import Host
        from hookd.tool.daemon.plugins.worker import Hosted

        assert not self._halves, "it was started already"
        config = ServeConfig()
        folder = self._ends.enter_context(tempfile.TemporaryDirectory())
        self._store = IncidentStore.open(Path(folder))
        self._ends.callback(self._store.close)
        self._fleet = Fleet(self._store, linger_s=config.linger_s, clock=self._now)
        self._ends.callback(self._fleet.close)
        texts = {key: str(value) for key, value in options.items()}
        self._halves = list(halves)
        self._hosted = [Hosted(one, {} if number else texts, self._now) for number, one in enumerate(halves)]
        self._host = Host(self._hosted, self._now)
        self._ends.callback(self._close_host)
        limits = Limits(config.detail, config.max_series, config.max_depth, config.top_modules)
        self._collector = FleetCollector(self._fleet, Tally(), limits, more=self._host.families)
        self._settle()
        self._require_accepted()
        self._callers = self._host.receivers(self._store)
        for caller in self._callers:
            self._store.listen(caller)
            self._ends.callback(caller.close)
        return self

    def _require_accepted(self) -> None:
        refused = [one for one in self._hosted if one.state == "refused"]
        if refused:
            self.close()
            self._hosted, self._halves = [], []
            name, trouble = refused[0].name, refused[0].trouble
            is_ours = trouble["where"].startswith(
                str(Path(hookd.__file__).parent)
            )  # the text has the author's line then
            where = f" ({trouble['where']})" if trouble["where"] and not is_ours else ""
            text = trouble["text"].removeprefix(f"{name}: ")
            raise PluginError(f"{name}: {text}{where}", hint=trouble["traceback"])

    def _half(self, plugin: type[DaemonPlugin] | str | Path) -> Half:
        from hookd.tool.daemon.plugins import discovery as halves

        if isinstance(plugin, type):
            return self._of_class(plugin)
        directories = [plugin.parent] if isinstance(plugin, Path) else []
        found, problems = halves.found(directories, lambda name: isinstance(plugin, Path) or name == plugin)
        for half in found:
            if half.path == plugin or (half.path is None and half.name == plugin):
                module = half.source.entry.partition(":")[0]
                if half.path is not None and module not in sys.modules:
                    self._ends.callback(sys.modules.pop, module, None)
                return half
        raise problems[0] if problems else PluginError(f"there is no daemon half of a plugin {str(plugin)!r}")

    def _of_class(self, plugin: type[DaemonPlugin]) -> Half:
        """Put a class that the test has imported where the daemon's own import finds it."""
        from hookd.tool.attach.sources import Source
        from hookd.tool.daemon.plugins.discovery import Half

        home = f"hookd_testing_{plugin.name}_{id(self):x}"
        module = sys.modules[home] = types.ModuleType(home)
        self._ends.callback(sys.modules.pop, home, None)
        setattr(module, plugin.__name__, plugin)
        known = [sys.modules.get(base.__module__) for base in plugin.__mro__]
        paths = {getattr(one, "__file__", None) for one in known} - {None, sys.modules["hookd.serving"].__file__}
        files = {Path(str(path)).name: Path(str(path)).read_bytes() for path in paths}
        return Half(plugin.name, Source(plugin.name, f"{home}:{plugin.__name__}", files))

    def _now(self) -> float:
        return time.monotonic() + self._ahead_s

    def _settle(self) -> None:
        """Wait until every plugin has done what it was asked for, or is put aside: late ones are, as in the daemon."""
        while not all(one.is_idle or one.state in ("quarantined", "refused") for one in self._hosted) or any(
            self._store.undelivered(caller.name, 1) for caller in self._callers
        ):
            for one in self._hosted:
                one.look()
            time.sleep(0.002)

    def stop_clean(self) -> None:
        """Close if it is open, and check that no hook has raised.

        Raises:
            AssertionError: with the tracebacks, which have the author's lines.
        """
        self.close()
        told = [
            f"{one['plugin']}: {one['hook']}: {one['text']}\n{one['where']}\n{one['traceback']}"
            for one in self.troubles
        ]
        assert not self.errors, f"hooks raised: {self.errors}\n" + "\n".join(dict.fromkeys(told))

    def close(self) -> None:
        """Let the plugins close, end the ranks, and let go of all."""
        self._ends.close()

    def _close_host(self) -> None:
        self._host.close()
        for one in self._hosted:
            one._thread.join(JOIN_S if one.is_idle else 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what the daemon does

    def ranks(self, count: int = 1, run: str = RUN) -> list[FakeRank]:
        """Attach to so many more ranks of a run; the plugins learn of them at the next look."""
        first = sum(one.run == run for one in self._ranks)
        made = [FakeRank(run, first + number, self._lose) for number in range(count)]
        for one in made:
            self._ends.callback(one.close)
            self._ranks.append(one)
            self._add(one.pid, one.page.fd)
        return made

    def attach(self, target: FakeTarget) -> None:
        """Attach to a training in this process: what its target halves publish is read from its real page."""
        self._add(os.getpid(), target._agent._page.fd)

    def _add(self, pid: int, fd: int) -> None:
        from hookd.tool.linux import proc

        assert self._halves, "call start() first"
        target = self._fleet._take(pid, os.dup(fd), proc.start_ticks(pid))
        assert target is not None, f"process {pid} has ended"
        self._targets[pid] = target

    def _lose(self, rank: FakeRank) -> None:
        self._fleet.lose(self._targets[rank.pid])

    def look(self, times: int = 1) -> None:
        """Do what the daemon does about once a second, and wait until the plugins have done their part of it."""
        from hookd.tool.daemon.plugins.host import PANEL_EVERY_S

        for _ in range(times):
            self._ahead_s += PANEL_EVERY_S
            self._fleet.poll()
            self._host.look(self._fleet.targets())
            self._settle()

    def incident(self, kind: str, message: str, *, run: str = RUN, rank: str = "0", **fields: object) -> None:
        """Store an incident, of which the plugins are told as by a daemon; `FakeRank.incident` takes the way of a page."""
        self._told += 1
        told = {"seq": self._told, "time": time.time(), "kind": kind, "message": message, **fields}
        self._store.add((os.getpid(), 0, 0), run, rank, [told], owner=os.getuid())
        self._settle()

    def invoke(self, command: str, *words: str) -> Result:
        """Run a command that a plugin adds to `hookd`, in this process; what it raises is raised here.

        Args:
            command: its name.
            words: its arguments.

        Returns:
            What click's own `CliRunner` gives: `exit_code`, `output`, ….

        Raises:
            KeyError: there is no such command.
            PluginError: a plugin gives what is no command, or takes a name of hookd's own.
        """
        from click.testing import CliRunner

        return CliRunner().invoke(self.commands()[command], words, prog_name=f"hookd {command}", catch_exceptions=False)

    def commands(self) -> dict[str, Any]:
        """Give the click commands that the plugins add to `hookd`, by name.

        Raises:
            PluginError: as `invoke`.
        """
        from hookd.tool.cli import COMMANDS, extensions

        found: dict[str, Any] = {}
        for half in self._halves:
            if half.has("register_commands"):
                extensions.add(found, half, COMMANDS)
        return found

    # -- what is seen

    def samples(self) -> list[Sample]:
        """Give name, labels and value of each series that `/metrics` would show now: of targets, plugins and daemon."""
        return [(one.name, one.labels, one.value) for family in self._collector.collect() for one in family.samples]

    def assert_metrics(self, expected: Mapping[str, object]) -> None:
        """Check values: `{'hookd_spread_steps{run="train.py"}': 2}`; see `hookd.testing.assert_metrics`."""
        values.assert_metrics(self.samples(), expected)

    def value(self, name: str, **labels: str) -> float:
        """Give the value of the only series of a name that has these labels, and perhaps others.

        Raises:
            KeyError: there is none, or there are several.
        """
        found = [value for one, its, value in self.samples() if one == name and labels.items() <= its.items()]
        if len(found) != 1:
            raise KeyError(f"{len(found)} series are {name} with {labels}")
        return found[0]

    @property
    def panels(self) -> list[dict[str, Any]]:
        """What `/api/v1/panels` would give: the plugin, title, columns and rows of each."""
        return self._host.panels()

    @property
    def panel(self) -> dict[str, Any]:
        """The only one there is."""
        (one,) = self.panels
        return one

    @property
    def incidents(self) -> list[dict[str, Any]]:
        """What the store has, the oldest first, as `hookd incidents --json` prints it."""
        return self._fleet.incidents()[::-1]

    def plugin(self, name: str) -> DaemonPlugin:
        """Give the plugin object that runs under a name."""
        hooks = self._named(name).hooks
        found: DaemonPlugin = next(iter(hooks.values()))[0].__self__  # type: ignore[attr-defined]
        return found

    def hooks(self, name: str) -> list[str]:
        """Name the hooks that a plugin has."""
        return list(self._named(name).hooks)

    def told(self, name: str) -> list[Told]:
        """Give the families of a plugin's metrics as it told them last, those of each run by themselves."""
        _, told = self._host._collected.get(name, (0.0, []))
        return [family for _, family in told]

    def state(self, name: str) -> str:
        """Give the state of a plugin: active, quarantined, …."""
        return self._named(name).state

    def _named(self, name: str) -> Hosted:
        return next(one for one in self._hosted if one.name == name)

    @property
    def errors(self) -> dict[tuple[str, str], int]:
        """How often hooks have raised, taken too long, or given what they may not, by plugin and hook."""
        return {(one.name, hook): count for one in self._hosted for hook, count in one.errors.items() if count}

    @property
    def troubles(self) -> list[dict[str, str]]:
        """The errors: plugin, hook and text, with the author's line (`where`) and the traceback."""
        return [{"plugin": one.name, **trouble} for one in self._hosted for trouble in one.troubles]
