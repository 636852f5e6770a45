"""Write metrics as event files for TensorBoard, from the daemon. See docs/tutorials/tensorboard.md."""

from __future__ import annotations

import itertools
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from tensorboard.summary import Writer

from hookd.serving import DaemonPlugin, Metrics, PluginError, Reading, hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_CURVES = 1000  # per rank


class TensorBoard(DaemonPlugin):
    """Writes gauges and counters of each rank over its steps."""

    name = "tensorboard"

    @hookimpl
    def configure(self, options: Mapping[str, str]) -> None:
        """Read the directory, the metrics to write, and the interval."""
        if "dir" not in options:
            raise PluginError("tensorboard: it needs a directory: dir = '…' in [daemon_plugins.tensorboard]")
        self.folder = Path(options["dir"])
        self.wanted = options.get("metrics", "hookd_*").split("|")
        self.every_s = float(options.get("every_s", "10"))
        self.writers: dict[int, tuple[Writer, int]] = {}  # by pid, with the last step
        self.points = 0

    @hookimpl
    def collect(self, ranks: Sequence[Reading], metrics: Metrics) -> None:
        """Write the metrics of each rank that has taken a step."""
        for rank in ranks:
            writer, step = self.writers.get(rank.pid, (None, None))
            if rank.step is not None and rank.step != step:
                folder = re.sub(r"[^\w.-]", "_", f"{rank.run}-rank{rank.rank}", flags=re.ASCII)[-100:]
                self.writers[rank.pid] = writer or Writer(str(self.folder / folder)), rank.step
                self._write(self.writers[rank.pid][0], rank, rank.step)
        metrics.counter("points", "Points written into event files, of all runs.", self.points)

    def _write(self, writer: Writer, rank: Reading, step: int) -> None:
        chosen = (item for item in rank.numbers() if any(fnmatchcase(item[0].name, glob) for glob in self.wanted))
        for family, labels, value in itertools.islice(chosen, MAX_CURVES):
            writer.add_scalar("/".join((family.name, *labels.values())), value, step)
            self.points += 1
        writer.flush()

    @hookimpl
    def target_lost(self, target: Reading) -> None:
        """Close the file of a process that has ended; after every `collect`, all files are complete."""
        if target.pid in self.writers:
            self.writers.pop(target.pid)[0].close()
