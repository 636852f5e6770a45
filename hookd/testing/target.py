"""A target in the test's own process, with the real agent, real torch, and a page that is read as the daemon reads it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import time
import types
from typing import TYPE_CHECKING, Any, cast

from hookd.testing import request, training, values
from hookd.testing.events import Event, recorded
from hookd.testing.incidents import Incident
from hookd.testing.pretence import pretending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from typing_extensions import Self

    from hookd.api.context import Context
    from hookd.api.plugin import Plugin
    from hookd.wire.agent import AgentConfig, PluginConfig
    from hookd.wire.page import PageReader, Snapshot

HOME = "hookd_testing_plugins"
"""Name of the module from which the agent imports the plugin classes of a test."""


class FakeTarget:
    """hookd in this process, with plugins given as classes or as names of installed plugins.

    Tests are about results of plugins, so the governor does not stretch sampling intervals (`budget=100`). Only one target can
    run at a time.

    Args:
        record: whether to record `events`; each plugin class is then replaced by a subclass.
        make: creates the training for `run_steps`, when it is first needed.

    Attributes:
        events: the recorded calls of hooks, in order.
    """

    def __init__(self, *, record: bool = True, make: Callable[[], training.Training] = training.small) -> None:
        self.events: list[Event] = []
        self._record, self._make = record, make
        self._training: training.Training | None = None
        self._reader: PageReader | None = None
        self._pretence = contextlib.ExitStack()
        self._clock: Callable[[], int] = time.perf_counter_ns
        self._runs = False

    # -- lifecycle

    def pretend(
        self,
        *,
        device: bool = False,
        large: bool = False,
        ranks: tuple[int, int] | None = None,
        clock: Callable[[], int] | None = None,
    ) -> Self:
        """Simulate what this machine lacks, from the next `start` to `close`.

        Args:
            device: treat tensors as if they were not in host memory: results of `Context.summary` and similar methods come a
                step later, or are tensors. Attributes of torch (`tensor.is_cpu`) still have the true values.
            large: treat outputs as too large to be kept alive: `Context.returned` has only those that the training keeps.
            ranks: the rank of this process, and the number of ranks. The other ranks do not exist.
            clock: returns nanoseconds; measures steps and the time that plugins take.

        Raises:
            AssertionError: the target is already running.
        """
        assert not self._runs, "call pretend() before start()"
        self._pretence.enter_context(pretending(device=device, large=large, ranks=ranks))
        self._clock = clock or self._clock
        return self

    def start(self, *plugins: type[Plugin] | str, **options: object) -> Self:
        """Start with these plugins.

        Args:
            plugins: classes, or names of installed plugins.
            options: of the first plugin.

        Raises:
            PluginError: a plugin breaks a rule or refuses its options; the message has your file and line.
        """
        return self.begin(plugins, options)

    def begin(self, plugins: tuple[type[Plugin] | str, ...], options: Mapping[str, object], **config: object) -> Self:
        """Start as `start` does, and pass `config` to the agent unchanged: budget, method, run, rank and so on."""
        import torch.nn

        from hookd.target.boot import bootstrap

        self._call = torch.nn.Module.__call__
        home = types.ModuleType(HOME)
        specs = [self._spec(plugin, home) for plugin in plugins]
        if specs:
            specs[0]["options"] = {name: str(value) for name, value in options.items()}
        sys.modules[HOME] = home
        try:
            defaults = {"method": "test", "plugins": specs, "lease_s": None, "run": "test", "budget": 100.0}
            bootstrap.start(cast("AgentConfig", {**defaults, **config}), clock=self._clock)
        finally:
            del sys.modules[HOME]
        self._runs = True
        self._open()
        return self

    def _spec(self, plugin: type[Plugin] | str, home: types.ModuleType) -> PluginConfig:
        if isinstance(plugin, str):
            if not self._record:
                return {"name": plugin, "options": {}, "by_name": True}
            plugin = installed(plugin)
        setattr(home, plugin.__name__, recorded(plugin, self.events) if self._record else plugin)
        return {"name": plugin.name, "entry": f"{HOME}:{plugin.__name__}", "options": {}, "by_name": True}

    def _open(self) -> None:
        from hookd.wire.page import PageReader

        if self._reader is not None:
            self._reader.close()
        self._reader = PageReader(os.dup(self._agent._page.fd))  # noqa: SLF001

    def stop(self) -> None:
        """Detach; the page can still be read.

        Raises:
            AssertionError: torch is not as it was before, or something of a plugin is still running.
        """
        import torch.nn

        from hookd.target.boot import bootstrap

        self._runs = False
        if bootstrap._agent is None:  # noqa: SLF001  (the test has stopped it)
            return
        result = bootstrap.stop()
        assert torch.nn.Module.__call__ is self._call, f"nn.Module.__call__ is not as it was before: {result}"
        assert result["restored"] == "identity" and not result["residue"], f"not as it was before: {result}"  # noqa: PT018

    def stop_clean(self) -> None:
        """Stop, if it is running, and check that no hook has raised, including `unconfigure`.

        Raises:
            AssertionError: a hook has raised; the message has the tracebacks.
        """
        if self._reader is None:
            return
        errors = self.errors
        if self._runs:
            self.stop()
        logs = self.logs  # errors of `unconfigure` are not counted
        has_failed = errors or any(": unconfigure raised " in line for line in logs)
        assert not has_failed, f"hooks raised: {errors}\n" + "\n".join(logs)

    def close(self) -> None:
        """Stop, if it is running, and release the page."""
        try:
            if self._runs:
                self.stop()
        finally:
            if self._reader is not None:
                self._reader.close()
            self._reader = None
            self._pretence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _agent(self) -> Any:
        from hookd.target.boot import bootstrap

        assert bootstrap._agent is not None, "no agent runs: call start() first"  # noqa: SLF001
        return bootstrap._agent  # noqa: SLF001

    @property
    def _parts(self) -> Any:
        return self._agent.parts

    # -- training

    @property
    def training(self) -> training.Training:
        """The training of `run_steps`."""
        if self._training is None:
            self._training = self._make()
        return self._training

    def run_steps(self, count: int = 1) -> list[float]:
        """Train `count` steps and return their losses."""
        losses = [self.training.step() for _ in range(count)]
        self._parts.steps.finish()
        return losses

    def tick(self, now_s: float | None = None) -> None:
        """Call the hooks `tick`, as the agent does about once a second.

        Args:
            now_s: unix seconds, by default the present. A minute later by this time, models that no longer exist are forgotten.
        """
        self._parts.ticks.tick(now_s if now_s is not None else time.time())

    def configure(self, name: str, step: Callable[[], object] | None = None, /, **options: object) -> dict[str, str]:
        """Change options of a plugin, as `hookd plugin config` does.

        Other options keep their values. A new plugin object replaces the old one.

        Args:
            name: of the plugin.
            step: trains one step in this thread. A plugin that changes the training is replaced when this step begins; without
                `step`, this method waits for a training in another thread.
            options: new values; an empty text resets an option to its default.

        Returns:
            The options that are set, as texts.

        Raises:
            PluginError: the plugin refuses the options; the old object continues.
            AssertionError: no step has begun.
        """
        texts = {key: str(value) for key, value in options.items()}
        return request.configure(self._agent._control.path, name, texts, step)  # noqa: SLF001

    def renew(self, name: str) -> None:
        """Replace a plugin at once by a new object with the same options, as `hookd plugin reload` does.

        Raises:
            PluginError: the new object refuses the options; the old one continues.
        """
        parts = self._parts
        old = parts.registry.named(name)
        new = parts.loading.ready(type(old.plugin)(), dict(old.context.options), by_name=True, old=old)
        parts.loading.switch(old, new)
        parts.loading.discard(old, new)

    def sample_every(self, name: str, steps: int) -> None:
        """Stretch the interval of a plugin's sampled hooks, as the governor does when the budget is exceeded."""
        self._parts.governor.stretch_to(self._parts.registry.named(name), steps)

    @contextlib.contextmanager
    def away(self) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
        """Restore everything that hookd has replaced, for the time of this context.

        Yields a function that returns a context manager in which hookd observes again.
        """
        parts = self._parts

        @contextlib.contextmanager
        def observing() -> Iterator[None]:
            # The time without hookd is not part of a step: to the governor, all costs would look half as large.
            parts.governor.forget_time()
            parts.models.counting.meter(is_metered=False)
            parts.arming.arm()
            parts.models.replan()
            try:
                yield
            finally:
                assert parts.arming.disarm() == "identity"

        assert parts.arming.disarm() == "identity"
        try:
            yield observing
        finally:
            parts.arming.arm()

    # -- results

    def plugin(self, name: str) -> Plugin:
        """Return the object of a loaded plugin."""
        plugin: Plugin = self._parts.registry.named(name).plugin
        return plugin

    def context(self, name: str) -> Context:
        """Return the context of a loaded plugin."""
        context: Context = self._parts.registry.named(name).context
        return context

    def state(self, name: str) -> str:
        """Return the state of a plugin: "active", "quarantined", "disabled" or "waiting"."""
        return str(self._parts.registry.named(name).state)

    def listens(self, name: str, hook: str) -> bool:
        """Whether a hook of a plugin is called in the current step; a sampled hook is called only in some steps.

        Raises:
            LookupError: the plugin has no such hook.
        """
        parts = self._parts
        are_on = [listener.is_on for listener in parts.registry.named(name).listeners if listener.hook == hook]
        if not are_on:
            raise LookupError(f"{name} has no hook {hook!r}")
        return any(are_on)

    def calls(self, hook: str) -> list[Event]:
        """Return the recorded calls of one hook."""
        return [event for event in self.events if event.hook == hook]

    def read(self) -> Snapshot:
        """Read the page, as the daemon does."""
        assert self._reader is not None, "nothing was started"
        return self._reader.read()

    def assert_metrics(self, expected: Mapping[str, object]) -> None:
        """Check values, as in `{'hookd_widths_calls_total{module="0"}': 3}`; see `hookd.testing.assert_metrics`."""
        values.assert_metrics(values.samples(self.read()), expected)

    def metric(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the first cell of each series of a metric, by label values.

        Args:
            name: with or without `hookd_`; that of a counter with or without `_total`.

        Raises:
            KeyError: there is no such metric.
        """
        full = name if name.startswith("hookd_") else f"hookd_{name}"
        for family in self.read().families:
            if full == family.name or (family.kind == "counter" and full == f"{family.name}_total"):
                return {series.values: series.cells[0] for series in family.series}
        raise KeyError(name)

    def value(self, name: str, *labels: str) -> float:
        """Return the value of the series with these label values."""
        return self.metric(name)[labels]

    @property
    def incidents(self) -> list[Incident]:
        """The incidents on the page, the oldest first."""
        return [Incident.from_page(incident) for incident in self.read().incidents]

    @property
    def incident(self) -> Incident:
        """The incident, if there is exactly one."""
        (incident,) = self.incidents
        return incident

    @property
    def errors(self) -> dict[tuple[str, ...], float]:
        """Number of calls that raised, or returned a value that the plugin may not return, by plugin."""
        return {labels: value for labels, value in self.metric("plugin_errors").items() if value}

    @property
    def logs(self) -> list[str]:
        """The lines of the agent's log."""
        return [entry["message"] for entry in self.read().logs]


def installed(name: str) -> type[Plugin]:
    """Import the class of an installed plugin.

    Raises:
        LookupError: no plugin of this name is installed.
    """
    for entry in importlib.metadata.entry_points(group="hookd.plugins"):
        if entry.name == name:
            plugin: type[Plugin] = entry.load()
            return plugin
    raise LookupError(f"no plugin {name!r} is installed here")
