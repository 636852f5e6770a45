"""A step that takes much longer than those before it is reported once, with the phase that has grown, and its end."""

from __future__ import annotations

from hookd.tool.daemon.watch.slowdown import BLOCK_S, MOST, PAST, RECENT, Slowdown
from tests.support.pages import Ranks, new_fleet

PHASES = {"data": 0.01, "forward": 0.1, "backward": 0.2, "optimizer": 0.01}


class Scene:
    """A run whose steps take as long as the test says, and a daemon that polls once for each block."""

    def __init__(self, stack, *, ranks=1):
        self.fleet, self.ranks, self.now = new_fleet(stack), Ranks(stack, ranks), 0.0
        self.watcher = Slowdown(self.fleet, lambda: self.now)

    def train(self, blocks, **phases):
        for _ in range(blocks):
            steps = max(5, int(BLOCK_S / sum({**PHASES, **phases}.values())))
            for rank, target in enumerate(self.ranks.targets):
                self.ranks.add(rank, "hookd_steps", steps)
                for phase, seconds in {**PHASES, "inference": 3.0, **phases}.items():
                    self.ranks.add(rank, "hookd_timing_phase_seconds", steps * seconds, phase=phase)
                target.read()
            self.now += 3 * BLOCK_S
            self.watcher.poll(self.ranks.targets)

    def reported(self):
        return [(row["kind"], row["message"]) for row in reversed(self.fleet.incidents())]


def test_a_slow_loader_is_named_once_and_its_end(stack):
    scene = Scene(stack, ranks=2)
    scene.train(PAST + 1)
    scene.train(RECENT - 1, data=0.6)
    assert not scene.reported()
    scene.train(3, data=0.6)
    ((kind, message),) = scene.reported()
    assert kind == "slowdown"
    assert (
        message
        == "a step takes 910 ms, 2.8 times as long as before (320 ms): waiting for data takes 600 ms instead of 10 ms"
    )
    scene.train(3)
    assert scene.reported()[1:] == [("slowdown_over", "a step takes 320 ms again")]


def test_what_grows_in_two_phases_is_said_of_both(stack):
    scene = Scene(stack)
    scene.train(PAST + 1)
    scene.train(RECENT, forward=0.4, backward=0.5)
    ((_, message),) = scene.reported()
    assert message.endswith(
        ": the forward takes 400 ms instead of 100 ms and the backward takes 500 ms instead of 200 ms"
    )


def test_single_slow_blocks_and_more_inference_are_no_slowdown(stack):
    scene = Scene(stack)
    scene.train(PAST)
    for _ in range(5):
        scene.train(RECENT - 1, other=30.0)
        scene.train(1)
    scene.train(RECENT + 1, inference=60.0)
    scene.train(RECENT + 1, forward=0.2)
    assert not scene.reported()


def test_a_slowdown_that_stays_becomes_the_usual_time(stack):
    scene = Scene(stack)
    scene.train(PAST + 1)
    scene.train(RECENT + MOST // 2, forward=0.9)
    assert [kind for kind, _ in scene.reported()] == ["slowdown", "slowdown_over"]
    assert "still takes 1.12 s, which is the usual time from now on" in scene.reported()[1][1]
    scene.train(PAST + RECENT, forward=0.9)
    assert len(scene.reported()) == 2


def test_a_daemon_that_was_restarted_begins_anew(stack):
    scene = Scene(stack)
    scene.train(PAST + 1)
    scene.train(RECENT, forward=0.9)
    scene.watcher = Slowdown(scene.fleet, lambda: scene.now)
    scene.train(PAST + 1)
    assert [kind for kind, _ in scene.reported()] == ["slowdown", "slowdown_over"]
