"""Targets for `hookd top` that are pages of this very process, and its screen, without a terminal."""

from __future__ import annotations

import asyncio
import os

from rich.cells import cell_len

from hookd.tool.cli.top.app import TopApp
from hookd.tool.cli.top.node import Node
from hookd.tool.cli.top.state import State
from hookd.tool.cli.top.target import Target
from hookd.tool.linux import proc
from hookd.wire.page import PageReader, PageWriter
from tests.support.processes import PATIENCE_S

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


class Unclocked(TopApp):
    """An app that reads when a test says so."""

    def _read_in(self, seconds):
        pass


def on_screen(state, story, width=80, height=24):
    """Run `story(pilot)` on the screen of a state, and return its result; errors of the app are raised."""

    async def run():
        async with Unclocked(state).run_test(size=(width, height)) as pilot:
            return await story(pilot)

    return asyncio.run(run())


async def resized(pilot, width, height):
    """Resize the terminal, and wait until the screen has its size."""

    async def settled():
        while len(pilot.app.screen._compositor.render_strips()) != height or pilot.app.screen.size != (width, height):
            await pilot.pause()

    await pilot.resize_terminal(width, height)
    await asyncio.wait_for(settled(), PATIENCE_S)


def text_of(app):
    """Return the lines of the screen, each as wide as the screen."""
    lines = [strip.text for strip in app.screen._compositor.render_strips()]
    assert len(lines) == app.size.height
    assert {cell_len(line) for line in lines} == {app.size.width}
    return [line.rstrip() for line in lines]


def shown(state, width=80, height=24, keys=()):
    """Press keys; return the lines of the screen."""

    async def story(pilot):
        await pilot.press(*keys)
        await pilot.pause()
        return text_of(pilot.app)

    return on_screen(state, story, width, height)


def press(state, *keys):
    """Press keys; return the exit code, or None if that did not end the app."""

    async def story(pilot):
        await pilot.press(*keys)
        await pilot.pause()
        return pilot.app.return_code

    return on_screen(state, story)


def named(state):
    return [state.view.table.names[row] for row in state.view.order]


def opened_state(job):
    """Return a state of the modules of a job after two readings; in between the first block took most of the time."""
    job.call([50.0] * len(NAMES), [50.0] * len(NAMES))
    state = State(Still(job), 1.0)
    state.refresh(100.0)
    state.enter()
    job.call([1.0, 0, 0.6, 0.5, 0.3, 0.2, 0.0, 0.1], [3.0, 0, 2.4, 2.0, 0.4, 0.3, 0.0, 0.2])
    state.refresh(101.0)
    return state
