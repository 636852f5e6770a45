"""Memory that grows steeply is reported once, and once more when that is over."""

from __future__ import annotations

import os

import pytest

from hookd.tool.daemon.watch.memory_growth import EVERY_S, MemoryGrowth, private_bytes
from hookd.tool.linux import headroom
from tests.support.pages import Ranks, new_fleet

MIB, GIB = 1 << 20, 1 << 30


class Scene:
    """A target with a memory that the test sets, and a daemon that looks every five seconds."""

    def __init__(self, stack, *, left=10 * GIB, steps=10):
        self.fleet = new_fleet(stack)
        self.ranks = Ranks(stack, 1)
        self.ranks.add(0, "hookd_steps", steps)
        self.now, self.used, self.left = 0.0, 4 * GIB, left
        self.watcher = MemoryGrowth(self.fleet, lambda: self.now, lambda _: self.used, lambda _: self.left)

    def grow(self, mib, times):
        for _ in range(times):
            self.now += EVERY_S
            self.used += int(mib * MIB)
            self.left -= int(mib * MIB)
            self.ranks.targets[0].read()
            self.watcher.poll(self.ranks.targets)

    def reported(self):
        return [(row["kind"], row["message"]) for row in reversed(self.fleet.incidents())]


def test_a_leak_that_ends_the_job_soon_is_reported_once_and_its_end(stack):
    scene = Scene(stack)
    scene.grow(360, 14)  # 72 MiB a second
    ((kind, message),) = scene.reported()
    assert kind == "memory_growth"
    assert message.startswith(
        "its memory grows by 72 MiB a second, 4.2 GiB in the last minute: the remaining 5.4 GiB last"
    )
    scene.grow(360, 1)
    scene.grow(0, 13)
    assert [kind for kind, _ in scene.reported()] == ["memory_growth", "memory_growth_over"]


@pytest.mark.parametrize("has_plugin", [False, True])
def test_the_next_step_is_one_that_has_not_been_done(stack, has_plugin):
    scene = Scene(stack)
    if has_plugin:
        scene.ranks.set(0, "hookd_memory_resident_bytes", 1.0, kind="anonymous")
    scene.grow(360, 14)
    ((_, message),) = scene.reported()
    assert ("plugin enable" in message, "memray attach" in message) == (not has_plugin, has_plugin)


@pytest.mark.parametrize(
    ("more", "mib", "times"),
    [({"left": 1000 * GIB}, 360, 14), ({"steps": 0}, 360, 14), ({}, 10, 30), ({}, 360, 9)],
    ids=["much-is-left", "loading", "slow", "short"],
)
def test_other_growth_is_not_reported(stack, more, mib, times):
    scene = Scene(stack, **more)
    scene.grow(mib, times)
    scene.grow(0, 20)
    assert not scene.reported()


def test_memory_that_is_freed_again_and_again_does_not_grow(stack):
    scene = Scene(stack)
    for _ in range(10):
        scene.grow(700, 2)
        scene.grow(-400, 2)
    assert not scene.reported()


def test_readings_before_a_pause_do_not_count(stack):
    scene = Scene(stack)
    scene.grow(360, 10)
    scene.now += 60
    scene.grow(360, 10)
    assert not scene.reported()


def test_what_is_private_and_what_is_left_are_read_from_the_system():
    before = private_bytes(os.getpid())
    block = bytearray(64 * MIB)
    after = private_bytes(os.getpid())
    assert after - before >= 60 * MIB
    assert headroom.memory_left(os.getpid()) > 0
    assert private_bytes(1 << 30) is None
    del block
