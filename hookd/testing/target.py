"""A target in the test's own process: the real agent, real torch, a page that is read as the daemon reads it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import time
import types
from typing import TYPE_CHECKING, Any

from hookd.testing import request, training, values
from hookd.testing.events import Event, recorded
from hookd.testing.pretence import pretending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from typing_extensions import Self

    from hookd.api.context import Context
    from hookd.api.plugin import Plugin
    from hookd.wire.page import PageReader, Snapshot

HOME = "hookd_testing_plugins"
"""The module under which the agent finds the plugin classes of a test."""


class FakeTarget:
    """hookd in this process, with plugins that are classes or names of installed ones.

    Nothing is slowed down or stretched (`budget=100`): tests are about what a plugin finds. Only one can run at a time.

    Args:
        record: whether `events` are written down; a plugin is then replaced by a subclass of it.
        make: makes the training that `run_steps` trains, when it is first asked for.

    Attributes:
        events: what the hooks were called with, in the order of the calls.
    """

    def __init__(self, *, record: bool = True, make: Callable[[], training.Training] = training.small) -> None:
        self.events: list[Event] = []
        self._record, self._make = record, make
        self._training: training.Training | None = None
        self._reader: PageReader | None = None
        self._pretence = contextlib.ExitStack()
        self._clock: Callable[[], int] = time.perf_counter_ns
        self._runs = False

    # -- life

    def pretend(
        self,
        *,
        device: bool = False,
        large: bool = False,
        ranks: tuple[int, int] | None = None,
        clock: Callable[[], int] | None = None,
    ) -> Self:
        """Show what this machine lacks, from the next `start` to `close`.

        Args:
            device: tensors are not in the host's memory: what `Context.summary` and the like tell of them comes a step
                later, or is a tensor itself. What a plugin asks torch for (`tensor.is_cpu`) stays true.
            large: outputs are too large to be kept alive: `Context.returned` has no more of them than the training keeps.
            ranks: the rank that this process is, and of how many. Nobody is there to play the others.
            clock: returns nanoseconds; steps and what plugins take are measured by it.

        Raises:
            AssertionError: it runs already, and has seen what there is.
        """
        assert not self._runs, "call pretend() before start()"
        self._pretence.enter_context(pretending(device=device, large=large, ranks=ranks))
        self._clock = clock or self._clock
        return self

    def start(self, *plugins: type[Plugin] | str, **options: object) -> Self:
        """Start with these plugins; the options are those of the first.

        Raises:
            PluginError: one breaks a rule or refuses its options; the message has the author's file and line.
        """
        return self.begin(plugins, options)

    def begin(self, plugins: tuple[type[Plugin] | str, ...], options: Mapping[str, object], **config: object) -> Self:
        """Start as `start` does; `config` goes to the agent as it is: budget, method, run, rank..."""
        import torch.nn

        from hookd.target.boot import bootstrap

        self._call = torch.nn.Module.__call__
        home = types.ModuleType(HOME)
        specs = [self._spec(plugin, home) for plugin in plugins]
        if specs:
            specs[0]["options"] = {name: str(value) for name, value in options.items()}
        sys.modules[HOME] = home
        try:
            bootstrap.start(
                {"method": "start", "plugins": specs, "lease_s": None, "run": "test", "budget": 100.0, **config},
                clock=self._clock,
            )
        finally:
            del sys.modules[HOME]
        self._runs = True
        self._open()
        return self

    def _spec(self, plugin: type[Plugin] | str, home: types.ModuleType) -> dict[str, Any]:
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
        """Detach; what the page holds can still be read.

        Raises:
            AssertionError: torch is not as it was before, or something of a plugin's goes on.
        """
        import torch.nn

        from hookd.target.boot import bootstrap

        self._runs = False
        if bootstrap._agent is None:  # noqa: SLF001  (the test has ended it)
            return
        result = bootstrap.stop()
        assert torch.nn.Module.__call__ is self._call, f"nn.Module.__call__ is not as it was before: {result}"
        assert result["restored"] == "identity" and not result["residue"], f"not as it was before: {result}"  # noqa: PT018

    def stop_clean(self) -> None:
        """Stop if it runs, and check that no hook has raised, `unconfigure` included.

        Raises:
            AssertionError: with the tracebacks, which have the author's lines.
        """
        if self._reader is None:
            return
        errors = self.errors
        if self._runs:
            self.stop()
        logs = self.logs  # what `unconfigure` raises is counted nowhere
        has_failed = errors or any(": unconfigure raised " in line for line in logs)
        assert not has_failed, f"hooks raised: {errors}\n" + "\n".join(logs)

    def close(self) -> None:
        """Stop if it runs, and let go of the page."""
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
        """What `run_steps` trains."""
        if self._training is None:
            self._training = self._make()
        return self._training

    def run_steps(self, count: int = 1) -> list[float]:
        """Train so many steps, and give their losses."""
        losses = [self.training.step() for _ in range(count)]
        self._parts.steps.finish()
        return losses

    def tick(self, now_s: float | None = None) -> None:
        """Let the hooks `tick` come, as about once a second; after a minute of such time models that are gone are forgotten."""
        self._parts.ticks.tick(now_s if now_s is not None else time.time())

    def configure(self, name: str, step: Callable[[], object] | None = None, /, **options: object) -> dict[str, str]:
        """Change options of a plugin, as `hookd plugin config` does: the others stay, and a new object takes its place.

        Args:
            name: of the plugin.
            step: takes one step of a training, in this thread. One that changes the training is changed where that begins;
                without it this waits for a training that runs in another thread.
            options: an empty text takes one back.

        Returns:
            The options that were given and not taken back, as texts.

        Raises:
            PluginError: it refuses them; the old object goes on.
            AssertionError: the step has not come.
        """
        texts = {key: str(value) for key, value in options.items()}
        return request.configure(self._agent._control.path, name, texts, step)  # noqa: SLF001

    def renew(self, name: str) -> None:
        """Put a new object with the same options in a plugin's place, at once, as `hookd plugin reload` does.

        Raises:
            PluginError: it refuses them; the old one goes on.
        """
        parts = self._parts
        old = parts.registry.named(name)
        new = parts.loading.ready(type(old.plugin)(), dict(old.context.options), by_name=True, old=old)
        parts.loading.switch(old, new)
        parts.loading.discard(old, new)

    def sample_every(self, name: str, steps: int) -> None:
        """Stretch the interval of a plugin's sampled hooks, as the governor does where the budget is exceeded."""
        self._parts.governor.stretch_to(self._parts.registry.named(name), steps)

    @contextlib.contextmanager
    def away(self) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
        """Put everything that hookd has replaced back for a while; the function that it gives observes meanwhile."""
        parts = self._parts

        @contextlib.contextmanager
        def observing() -> Iterator[None]:
            # What lay between is no step of the training: to the governor all that it spends would look half as dear.
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

    # -- what is seen

    def plugin(self, name: str) -> Plugin:
        """Give the plugin object that is loaded under a name."""
        found: Plugin = self._parts.registry.named(name).plugin
        return found

    def context(self, name: str) -> Context:
        """Give the context of the plugin that is loaded under a name."""
        found: Context = self._parts.registry.named(name).context
        return found

    def state(self, name: str) -> str:
        """Give the state of a plugin: active, quarantined, disabled or waiting."""
        return str(self._parts.registry.named(name).state)

    def listens(self, name: str, hook: str) -> bool:
        """Whether a hook of a plugin is called in the step in progress; sampled ones are in some.

        Raises:
            LookupError: the plugin has no such hook.
        """
        parts = self._parts
        found = [one.is_on for one in parts.registry.named(name).listeners if one.hook == hook]
        if not found:
            raise LookupError(f"{name} has no hook {hook!r}")
        return any(found)

    def calls(self, hook: str) -> list[Event]:
        """Give the events of one hook."""
        return [event for event in self.events if event.hook == hook]

    def read(self) -> Snapshot:
        """Read the page, as the daemon does."""
        assert self._reader is not None, "nothing was started"
        return self._reader.read()

    def assert_metrics(self, expected: Mapping[str, object]) -> None:
        """Check values: `{'hookd_widths_calls_total{module="0"}': 3}`; see `hookd.testing.assert_metrics`."""
        values.assert_metrics(values.samples(self.read()), expected)

    def metric(self, name: str) -> dict[tuple[str, ...], float]:
        """Give the first cell of all series of a metric by their label values.

        Args:
            name: with or without `hookd_`, without `_total`.

        Raises:
            KeyError: there is none.
        """
        full = name if name.startswith("hookd_") else f"hookd_{name}"
        for family in self.read().families:
            if family.name == full:
                return {series.values: series.cells[0] for series in family.series}
        raise KeyError(name)

    def value(self, name: str, *labels: str) -> float:
        """Give the value of one series by its label values."""
        return self.metric(name)[labels]

    @property
    def incidents(self) -> list[dict[str, Any]]:
        """What was worth telling a person."""
        return self.read().incidents

    @property
    def incident(self) -> dict[str, Any]:
        """The only one there is."""
        (one,) = self.incidents
        return one

    @property
    def errors(self) -> dict[tuple[str, ...], float]:
        """How often hooks have raised, or returned something without the right to, by plugin."""
        return {labels: value for labels, value in self.metric("plugin_errors").items() if value}

    @property
    def logs(self) -> list[str]:
        """The lines of the agent's log."""
        return [entry["message"] for entry in self.read().logs]


def installed(name: str) -> type[Plugin]:
    """Import the class of a plugin that is installed here.

    Raises:
        LookupError: there is none of this name.
    """
    for entry in importlib.metadata.entry_points(group="hookd.plugins"):
        if entry.name == name:
            found: type[Plugin] = entry.load()
            return found
    raise LookupError(f"no plugin {name!r} is installed here")
