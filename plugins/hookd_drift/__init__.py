"""Checksums by which a daemon sees that the replicas of a model are no longer alike. Runs in the target.

Of what DistributedDataParallel keeps alike on all ranks, before one optimizer step in `every`:

    hookd_drift_checksum{module}    of the bits of the module's own parameters (what=gradients: of their gradients); a
                                    whole number below 2**52
    hookd_drift_mark                at which boundary: collectives that the job had begun, the same number on all ranks
    hookd_drift_step                at which step, as this rank counts
    hookd_drift_layout              what is compared: names, shapes, types and the ranks of the process group. Ranks in
                                    which it differs hold different things, and are not compared

The daemon compares ranks at the same mark (`hookd/tool/daemon/watch/drift.py`): which differ, in which module, since when. This
plugin only adds up. It calls no collective, and waits for no device: the sums are made there, and read a step later.

A parameter's bits are added up as whole numbers of 64 bits, which wrap around. That does not depend on the order, so it
is the same on every device, and one flipped bit changes it for sure. Elements that have changed places in pairs of 8
bytes do not. Of a module's parameters each sum counts with a factor of its own.

Not compared: buffers (the running statistics of BatchNorm are each rank's own), parameters that
DistributedDataParallel was told to ignore, distributed tensors (FSDP2, tensor parallelism) and flat parameters of FSDP,
of which each rank holds another part, and what belongs to experts (`allreduce = False`).

Options:

    every=100        steps from one checksum to the next. All ranks choose the same ones, whatever they call them
    what=parameters  or gradients, as they are when the optimizer is about to use them
    replicated=ddp   or all: parameters of all models, for a training that averages gradients by itself
    modules=64       series at most; of a model with more modules those of the deepest are joined
"""

from __future__ import annotations

import zlib

import torch

from hookd import Context, Plugin, PluginError, hookimpl
from hookd_drift.bits import joined, pieces, sum_of
from hookd_drift.replicas import Replica, group_of, owners, replicas


class Drift(Plugin):
    """Publishes checksums of what should be alike on all ranks."""

    name = "drift"
    every = 100

    @hookimpl
    def configure(self, context: Context) -> None:
        """Read the options and declare the metrics."""
        self.context = context
        self.interval = context.option("every", self.every)
        self.what = context.option("what", "parameters", choices=("parameters", "gradients"))
        self.replicated = context.option("replicated", "ddp", choices=("ddp", "all"))
        self.most = context.option("modules", 64)
        if self.most < 1:
            raise PluginError("drift: modules must be 1 or more")
        self.checksum = context.gauge(
            "checksum", "Of the bits of the module's own parameters or gradients.", ["module"]
        )
        self.mark = context.gauge("mark", "Collectives that the job had begun at the checksum.")
        self.step = context.gauge("step", "Step of the checksum, as this rank counts.")
        self.layout = context.gauge("layout", "What is compared, and with which ranks; as a number.")
        self.shown: set[str] = set()
        self.before = 0

    @hookimpl
    def step_pre(self) -> None:
        """Add up, at the steps at which all ranks do."""
        mark, before = self.context.mark, self.before
        self.before = mark
        if before and is_due(before, mark, self.interval):
            self._look(mark)

    def _look(self, mark: int) -> None:
        held = self._held()
        if not held:
            return
        labels = owners([one.name for one in held], self.most)
        layout = zlib.crc32(repr([self.what, group_of(held), *(one.layout for one in held)]).encode())
        step = self.context.step
        by_device: dict[torch.device, list[int]] = {}
        for at, one in enumerate(held):
            by_device.setdefault(one.tensor.device, []).append(at)
        found: list[int] = [0] * len(held)
        waiting = [len(by_device)]

        for places in by_device.values():

            def arrived(numbers: list[float], places: list[int] = places) -> None:
                for at, value in zip(places, joined(numbers, len(places))):
                    found[at] = value
                waiting[0] -= 1
                if not waiting[0]:
                    self._publish(labels, found, mark, step, layout)

            self.context.later(pieces(torch.stack([sum_of(held[at].tensor) for at in places])), arrived)

    def _held(self) -> list[Replica]:
        models = [("" if root.root == 1 else f"#{root.root}.", model) for root, model in self.context.models()]
        is_all, is_gradients = self.replicated == "all", self.what == "gradients"
        return replicas(models, self.context.is_readable, is_all=is_all, is_gradients=is_gradients)

    def _publish(self, labels: list[str], sums: list[int], mark: int, step: int, layout: int) -> None:
        by_module: dict[str, int] = {}
        for label, value in zip(labels, sums):
            by_module[label] = mixed(by_module.get(label, 0), value)
        for gone in self.shown - by_module.keys():
            self.checksum.remove(gone)
        self.shown = set(by_module)
        self.mark.set(0.0)  # who reads the page meanwhile shall not take new sums for those of the mark before
        for label, value in by_module.items():
            self.checksum.labels(label).set(float(value))
        self.layout.set(float(layout))
        self.step.set(float(step))
        self.mark.set(float(mark))


PRIME = 2**52 - 47
"""The largest below 2**52: no difference of a single bit is a multiple of it."""
FACTOR = 6364136223846793005
"""Knuth's multiplier (MMIX): any that is no multiple of PRIME would do."""


def mixed(known: int, value: int) -> int:
    """Take one more sum into a module's checksum."""
    return (known * FACTOR + value + 1) % PRIME


def is_due(before: int, mark: int, every: int) -> bool:
    """Whether a step is one of those at which all ranks add up: all see the same marks, and so choose the same ones.

    Args:
        before: mark of the step before.
        mark: of this one; as many collectives more as a step has.
        every: steps from one to the next.
    """
    passed = mark - before
    return passed > 0 and mark % (every * passed) < passed
