"""What hookd measures, as event files for TensorBoard; runs in the daemon. See docs/tutorials/tensorboard.md."""

from __future__ import annotations

import fnmatch
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tensorboard.summary import Writer

from hookd import PluginError
from hookd.serving import DaemonPlugin, Metrics, Reading, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_TAGS = 1000
"""Curves of one rank."""


class TensorBoard(DaemonPlugin):
    """Writes gauges and counters of each rank over its steps."""

    name = "tensorboard"

    @hookimpl
    def configure(self, options: Mapping[str, str]) -> None:
        """Read where to write, what, and how often."""
        if "dir" not in options:
            raise PluginError("tensorboard: it needs a directory: dir = '…' in [daemon_plugins.tensorboard]")
        self.folder = Path(options["dir"])
        self.wanted = re.compile("|".join(map(fnmatch.translate, options.get("metrics", "hookd_*").split("|"))))
        self.every_s = float(options.get("every_s", "10"))
        self.open: dict[int, tuple[Writer, int, float]] = {}  # by pid: with the last step, and when that was
        self.points = 0

    @hookimpl
    def collect(self, ranks: Sequence[Reading], metrics: Metrics) -> None:
        """Write of each rank that has taken a step, where it is time to."""
        for rank in ranks:
            writer, step, at = self.open.get(rank.pid) or (None, None, -self.every_s)
            if rank.step is not None and rank.step != step and time.monotonic() - at >= self.every_s:
                folder = re.sub(r"[^\w.-]", "_", f"{rank.run}-rank{rank.rank}", flags=re.ASCII)[-100:]
                writer = writer or Writer(str(self.folder / folder))
                self.open[rank.pid] = writer, rank.step, time.monotonic()
                self._write(writer, rank, rank.step)
        metrics.counter("points", "Points written into event files, of all runs.", self.points)

    def _write(self, writer: Writer, rank: Reading, step: int) -> None:
        plain = [family.name for family in rank.families if family.kind != "histogram"]
        curves = [(name, *one) for name in plain if self.wanted.match(name) for one in rank.series(name)][:MAX_TAGS]
        for name, labels, value in curves:
            writer.add_scalar("/".join((name, *labels.values())), value, step)
        writer.flush()
        self.points += len(curves)

    @hookimpl
    def target_lost(self, target: Reading) -> None:
        """Close the file of a process that has ended."""
        if target.pid in self.open:
            self.open.pop(target.pid)[0].close()

    @hookimpl
    def close(self) -> None:
        """Close all of them."""
        for writer, *_ in self.open.values():
            writer.close()
