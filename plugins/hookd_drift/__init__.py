"""Compute checksums by which the daemon detects that the replicas of a model have diverged.

For the parameters that DistributedDataParallel keeps equal on all ranks, before one optimizer step in `every`:

    hookd_drift_checksum{module}    checksum of the bits of the module's own parameters (what=gradients: of their
                                    gradients); a whole number below 2**52
    hookd_drift_mark                point of the checksum: number of collectives that the job had begun, the same on all
                                    ranks
    hookd_drift_step                step of the checksum, as this rank counts
    hookd_drift_layout              identifies the compared parameters by their names, shapes, dtypes and the ranks of
                                    the process group. Ranks with different layouts are not compared

The daemon compares ranks at the same mark (`hookd/tool/daemon/watch/drift.py`), and reports which ranks differ, in
which module, and since when. This plugin only computes sums. It calls no collective and waits for no device: the sums
are computed on the device, and read a step later.

A parameter's bits are added up as 64-bit integers, with wraparound. The sum does not depend on the order of addition,
so it is the same on every device, and a single flipped bit always changes it. It does not change if aligned groups of 8
bytes change places. The checksum of a module weights the sum of each of its parameters with a different factor.

Not compared: buffers (the running statistics of BatchNorm belong to each rank), parameters that DistributedDataParallel
ignores by its own settings, parameters of which each rank has only a part (distributed tensors of FSDP2 and tensor
parallelism, flat parameters of FSDP), and parameters of experts (`allreduce = False`).

Options:

    every=100        steps from one checksum to the next. All ranks choose the same steps, however they number them
    what=parameters  or gradients, as they are when the optimizer is about to use them
    replicated=ddp   or all: parameters of all models, for a training that averages gradients by itself
    modules=64       most series; in a model with more modules, the deepest are combined
"""

from __future__ import annotations

import zlib

import torch

from hookd import Context, Plugin, hookimpl
from hookd_drift.bits import joined, pieces, sum_of
from hookd_drift.replicas import Replica, group_of, owners, replicas


class Drift(Plugin):
    """Publishes checksums of parameters or gradients that should be equal on all ranks."""

    name = "drift"
    every = 100

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options and declare the metrics."""
        self.context = context
        self.interval = context.option("every", self.every)
        self.what = context.option("what", "parameters", choices=("parameters", "gradients"))
        self.replicated = context.option("replicated", "ddp", choices=("ddp", "all"))
        self.most = context.option("modules", 64, least=1)
        self.checksum = context.gauge(
            "checksum", "Checksum of the bits of the module's own parameters or gradients.", ["module"]
        )
        self.mark = context.gauge("mark", "Collectives that the job had begun at the checksum.")
        self.step = context.gauge("step", "Step of the checksum, as this rank counts.")
        self.layout = context.gauge("layout", "Identifies the compared parameters and ranks; a hash.")
        self.shown: set[str] = set()
        self.before = 0

    @hookimpl
    def step_pre(self) -> None:
        """Compute the checksums, at the steps that all ranks choose."""
        mark, before = self.context.mark, self.before
        self.before = mark
        if before and is_due(before, mark, self.interval):
            self._checksum(mark)

    def _checksum(self, mark: int) -> None:
        tensors = self._replicas()
        if not tensors:
            return
        labels = owners([replica.name for replica in tensors], self.most)
        layout = zlib.crc32(repr([self.what, group_of(tensors), *(replica.layout for replica in tensors)]).encode())
        step = self.context.step
        by_device: dict[torch.device, list[int]] = {}
        for at, replica in enumerate(tensors):
            by_device.setdefault(replica.tensor.device, []).append(at)
        sums: list[int] = [0] * len(tensors)
        waiting = [len(by_device)]

        for places in by_device.values():

            def arrived(numbers: list[float], places: list[int] = places) -> None:
                for at, value in zip(places, joined(numbers, len(places))):
                    sums[at] = value
                waiting[0] -= 1
                if not waiting[0]:
                    self._publish(labels, sums, mark, step, layout)

            self.context.later(pieces(torch.stack([sum_of(tensors[at].tensor) for at in places])), arrived)

    def _replicas(self) -> list[Replica]:
        models = [(root.name, model) for root, model in self.context.models()]
        is_all, is_gradients = self.replicated == "all", self.what == "gradients"
        return replicas(models, self.context.is_readable, is_all=is_all, is_gradients=is_gradients)

    def _publish(self, labels: list[str], sums: list[int], mark: int, step: int, layout: int) -> None:
        by_module: dict[str, int] = {}
        for label, value in zip(labels, sums):
            by_module[label] = mixed(by_module.get(label, 0), value)
        for gone in self.shown - by_module.keys():
            self.checksum.remove(gone)
        self.shown = set(by_module)
        self.mark.set(0.0)  # a reader must not take new sums for those of the mark before
        for label, value in by_module.items():
            self.checksum.labels(label).set(float(value))
        self.layout.set(float(layout))
        self.step.set(float(step))
        self.mark.set(float(mark))


PRIME = 2**52 - 47
"""The largest prime below 2**52: no difference of a single bit is a multiple of it."""
FACTOR = 6364136223846793005
"""Knuth's multiplier (MMIX); any number works that is not a multiple of PRIME."""


def mixed(known: int, value: int) -> int:
    """Return a module's checksum with one more sum in it."""
    return (known * FACTOR + value + 1) % PRIME


def is_due(before: int, mark: int, every: int) -> bool:
    """Whether a checksum is due at a step; all ranks see the same marks, and so choose the same steps.

    Args:
        before: mark of the step before.
        mark: mark of this step; greater by the number of collectives in a step.
        every: steps from one checksum to the next.
    """
    passed = mark - before
    return passed > 0 and mark % (every * passed) < passed
