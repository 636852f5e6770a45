"""Functions for a process that observes itself: `start` and `stop`, `observe`, `read`."""

from __future__ import annotations

import contextlib
import logging
import posix
from typing import TYPE_CHECKING, Any

from hookd.errors import AttachError, HookdError, PageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

    from hookd.wire.agent import Detached, PluginConfig
    from hookd.wire.page import PageReader
    from hookd.wire.report import Report

_log = logging.getLogger("hookd")
DEFAULT = ("nan", "timing", "activations", "learning")


def start(
    plugins: Iterable[str | tuple[str, Mapping[str, object]]] = DEFAULT,
    *,
    run: str | None = None,
    rank: int | None = None,
    budget: float = 0.01,
) -> None:
    """Start observing this process; any number of daemons may then read it, and `stop` ends it.

    Args:
        plugins: names, or pairs of a name and its options; naming a plugin that changes training enables it.
        run: the label `run`; found from the environment if None.
        rank: the label `rank`; found from the environment if None.
        budget: the share of step time that all plugins together may take.

    Raises:
        HookdError: an agent is already running, torch is not imported, or a plugin is unknown or refuses its options.
    """
    from hookd.target.boot import bootstrap

    specs: list[PluginConfig] = []
    for plugin in plugins:
        name, options = (plugin, {}) if isinstance(plugin, str) else plugin
        texts = {k: str(v) for k, v in dict(options).items()}
        specs.append({"name": name, "options": texts, "by_name": plugins is not DEFAULT})
    bootstrap.start({"method": "start", "plugins": specs, "lease_s": None, "run": run, "rank": rank, "budget": budget})


def stop(timeout_s: float = 10.0) -> Detached:
    """Detach: restore everything and release all state.

    Returns:
        `restored` (identity, pass-through or pending) and `residue`, a description of what could not be undone.

    Raises:
        HookdError: nothing was started.
    """
    from hookd.target.boot import bootstrap

    return bootstrap.stop(timeout_s)


def read() -> Report:
    """Return a report on this process so far, as `hookd report PID --json` prints it.

    It includes `step`, `overhead`, `modules` with the metrics of each, `plugins`, `incidents`. Any thread may call it. It
    copies the page, as a daemon does, and costs the training only that time.

    Raises:
        HookdError: no agent observes this process, or the agent was attached from outside.
    """
    with _page() as reader:
        return _report(reader)


@contextlib.contextmanager
def _page() -> Iterator[PageReader]:
    """Open the page of this process; it can be read until the end of the block, even after the agent has left."""
    from hookd.target.boot import bootstrap
    from hookd.wire.page import PageReader

    reader = PageReader(bootstrap.page())
    try:
        yield reader
    finally:
        reader.close()


def _report(reader: PageReader) -> Report:
    from hookd.tool.reports.report import RECENT, build_report

    return build_report(reader.read(), posix.getpid(), records=reader.recent(RECENT))


class Observation:
    """A period in which this process is observed; `observe` creates one.

    If an agent is already running (of `hookd attach` or `hookd run`), or there is no memory for a page, it logs a warning to the
    logger `hookd` and changes nothing: the training does not fail. It can be pickled.

    Attributes:
        report: the report at the end, as `read` returns it; None before, and if there was nothing to read.
    """

    def __init__(
        self,
        plugins: Iterable[str | tuple[str, Mapping[str, object]]] = DEFAULT,
        *,
        run: str | None = None,
        rank: int | None = None,
        budget: float = 0.01,
    ) -> None:
        self.report: Report | None = None
        self._plugins = plugins if plugins is DEFAULT else tuple(plugins)
        self._run, self._rank, self._budget = run, rank, budget
        self._attached: float | None = None

    def begin(self) -> None:
        """Start observing, unless this observation is already on.

        Raises:
            HookdError: torch is not imported, or a plugin is unknown or refuses its options.
        """
        from hookd.target.boot import bootstrap

        if self.is_on:
            return
        self.report = None
        try:
            start(self._plugins, run=self._run, rank=self._rank, budget=self._budget)
        except (AttachError, PageError) as exc:
            _log.warning("hookd did not start an agent here: %s", exc.message)
        else:
            self._attached = bootstrap.attached()

    @property
    def is_on(self) -> bool:
        """Whether the agent that this observation has started is still there."""
        from hookd.target.boot import bootstrap

        return self._attached is not None and self._attached == bootstrap.attached()

    def end(self) -> None:
        """Store the report, and stop the agent if this observation has started it.

        It may be called twice, and never raises a HookdError.
        """
        from hookd.tool.reports.collapse import collapse

        is_mine, self._attached = self.is_on, None
        try:
            with _page() as reader:
                report = _report(reader)
                if is_mine:
                    stop()
                    last = reader.read()  # a detach may add incidents: it processes everything still pending
                    report["state"], report["incidents"] = last.state, collapse(last.incidents)
                self.report = report
        except HookdError as exc:
            if is_mine:
                _log.warning("hookd could not read the report: %s", exc.message)

    def __enter__(self) -> Observation:  # noqa: PYI034 - Self is of 3.11
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def observe(
    plugins: Iterable[str | tuple[str, Mapping[str, object]]] = DEFAULT,
    *,
    run: str | None = None,
    rank: int | None = None,
    budget: float = 0.01,
) -> Observation:
    """Return an observation for a `with` statement: `with hookd.observe(): train()`; the arguments are those of `start`."""
    return Observation(plugins, run=run, rank=rank, budget=budget)


def load_ipython_extension(shell: Any) -> None:
    """Register `%hookd` and `%%hookd` in a notebook; IPython calls this at `%load_ext hookd`."""
    from hookd.integrations.jupyter import HookdMagics

    shell.register_magics(HookdMagics)
