"""Targets for `hookd top` that are pages of this very process, and an app that is shown and pressed without a terminal."""

from __future__ import annotations

import os

from rich.cells import cell_len

from hookd.tool.cli.top.state import State
from hookd.tool.cli.top.node import Node
from hookd.tool.cli.top.target import Target
from hookd.tool.linux import proc
from hookd.wire.page import PageReader, PageWriter

NAMES = ["(root)", "blocks", "blocks.0", "blocks.0.attn", "blocks.1", "blocks.1.attn", "blocks.10", "head"]


class Job:
    """A target that is a page of this very process."""

    def __init__(self, stack, run="train.py", rank=0, names=NAMES):
        identity = {"pid": os.getpid(), "run": run, "rank": rank, "script": run, "world_size": 1, "step_offset": None}
        self.page = PageWriter.create(identity)
        self.page.set_state("running")
        stack.callback(self.page.close)
        self.names = names
        for name in names:
            self.page.module(name, "Linear", 1)
        self.target = Target(os.getpid(), proc.start_ticks(os.getpid()), PageReader(os.dup(self.page.fd)))
        stack.callback(self.target.close)

    def add(self, thing, values, metric="counter", **labels):
        """Add to each module's counter, in the order of the names, or set its gauge."""
        family = self.page.family(f"hookd_{thing}", metric, "Help.", ("module", *labels))
        for name, value in zip(self.names, values, strict=False):
            at = self.page.series(family, (name, *labels.values()))
            self.page.cells[at] = value + (self.page.cells[at] if metric == "counter" else 0)

    def step(self, count, seconds=0.1):
        cell = self.page.series(self.page.family("hookd_steps", "counter", "Help.", ()), ())
        self.page.cells[cell] += count
        times = self.page.family("hookd_step_seconds", "histogram", "Help.", (), (0.1, 1.0))
        at = self.page.series(times, ())
        self.page.cells[at] += count
        self.page.cells[at + 3] += count * seconds

    def call(self, forward, backward=None, calls=1):
        self.add("timing_forward_seconds", forward)
        self.add("timing_forward_self_seconds", [value / 2 for value in forward])
        self.add("timing_forward_calls", [calls] * len(forward))
        if backward:
            self.add("timing_backward_seconds", backward)
            self.add("timing_backward_self_seconds", [value / 2 for value in backward])
            self.add("timing_backward_calls", [calls] * len(backward))


class Still(Node):
    """A node of the targets that a test has made; `read` looks for no others."""

    def __init__(self, *jobs):
        super().__init__(None)
        self.targets = [job.target for job in jobs]

    def _scan(self):
        pass


def shown(app, width=80, height=24):
    lines = app.lines(width, height)
    assert len(lines) == height
    assert {cell_len(line.plain) for line in lines} == {width}
    return [line.plain.rstrip() for line in lines]


def press(app, *keys):
    for key in keys:
        app.press(key)


def named(app):
    return [app.view.table.names[row] for row in app.view.order]


def opened_app(job):
    """Give an app that shows the modules of a job after two readings; in between the first block took most of the time."""
    job.call([50.0] * len(NAMES), [50.0] * len(NAMES))
    app = App(Still(job), 1.0)
    app.refresh(100.0)
    press(app, "enter")
    job.call([1.0, 0, 0.6, 0.5, 0.3, 0.2, 0.0, 0.1], [3.0, 0, 2.4, 2.0, 0.4, 0.3, 0.0, 0.2])
    app.refresh(101.0)
    return app
