"""`hookd record`: a page sampled by an injected clock, and the files that are made of it."""

from __future__ import annotations

import json
import os
import threading
import xml.etree.ElementTree as ET

import pytest

from hookd.errors import ControlError, NoSuchTarget
from hookd.tool.attach.sampler import Recording, Track, sample
from hookd.tool.cli import flame, main
from hookd.wire.page import MODULE, PHASES, PageWriter
from hookd.wire.page.layout import MIN_SIZE, PHASE, STEP
from hookd.wire.page.snapshot import ModuleEntry

SVG = "{http://www.w3.org/2000/svg}"
FORWARD, BACKWARD, OTHER = (PHASES.index(name) for name in ("forward", "backward", "other"))


class Target:
    """This process as a target whose page the test writes, and a clock that advances when the sampler sleeps.

    Args:
        script: the main thread's state at each look at the page: (phase, module, step).
    """

    def __init__(self, script):
        self.page = PageWriter.create({"pid": os.getpid(), "start_ticks": 0}, size=MIN_SIZE)
        self.page.set_state("running")
        self.modules = {name: self.page.module(name, kind, 1) for name, kind in (
            ("(root)", "GPT"), ("blocks", "ModuleList"), ("blocks.0", "Block"), ("blocks.0.attn", "Attention"),
        )}  # fmt: skip
        self.main = self.page.thread(threading.get_native_id(), "MainThread")
        self.idle = self.page.thread(1, "pin_memory")
        self.now, self.script = 100.0, list(script)
        self.turn()

    def turn(self):
        phase, module, step = self.script.pop(0) if self.script else (OTHER, "", 0)
        self.page.cells[self.main + PHASE] = phase
        self.page.cells[self.main + MODULE] = self.modules.get(module, 0)
        self.page.cells[self.main + STEP] = step or self.page.cells[self.main + STEP]

    def sleep(self, seconds):
        self.now += seconds
        self.turn()

    def sample(self, **how):
        how = {"rate_hz": 8.0, "seconds": None, "steps": None, "timeout_s": 5.0, **how}
        return sample(os.getpid(), clock=lambda: self.now, sleep=self.sleep, **how)


@pytest.fixture
def target():
    made = []

    def make(script):
        made.append(Target(script))
        return made[-1]

    yield make
    for one in made:
        one.page.close()


def test_the_time_of_each_stack_is_that_between_looks_and_idle_threads_are_left_out(target):
    found = target(
        [
            (FORWARD, "(root)", 7),
            (FORWARD, "blocks.0.attn", 7),
            (FORWARD, "blocks.0.attn", 7),
            (BACKWARD, "", 7),
            (OTHER, "", 8),
        ]
    ).sample(seconds=0.625)
    (track,) = found.tracks
    assert (track.name, track.tid, found.steps, found.samples, found.ended) == (
        "MainThread",
        threading.get_native_id(),
        1,
        6,
        False,
    )
    assert found.seconds == pytest.approx(0.625)
    assert [(stack, round(seconds, 3)) for stack, seconds in found.stacks(track)] == [
        (("forward", "(root) (GPT)"), 0.125),
        (("forward", "(root) (GPT)", "blocks.0 (Block)", "blocks.0.attn (Attention)"), 0.25),
        (("backward",), 0.125),
        (("other",), 0.125),
    ]


def test_steps_are_recorded_from_the_end_of_one_to_the_end_of_another(target):
    script = [
        (FORWARD, "", 0),
        (BACKWARD, "", 0),
        *[(FORWARD, "(root)", 61)] * 3,
        *[(FORWARD, "(root)", 62)] * 2,
        (OTHER, "", 63),
    ]
    found = target(script).sample(steps=2)
    assert (found.steps, round(found.seconds, 3), found.samples) == (2, 0.625, 5)
    assert [stack for stack, _ in found.stacks(found.tracks[0])] == [("forward", "(root) (GPT)")]


def test_steps_that_do_not_come_and_targets_that_are_none_are_reported(target):
    with pytest.raises(NoSuchTarget, match="no agent in process") as none:
        sample(os.getpid(), rate_hz=10, seconds=1, steps=None, timeout_s=1)
    assert none.value.reason == "not-attached"
    with pytest.raises(NoSuchTarget, match="there is no process"):
        sample(2**22 + 1, rate_hz=10, seconds=1, steps=None, timeout_s=1)
    with pytest.raises(ControlError, match="has done 1 of 9 steps within 1 s"):
        target([(FORWARD, "", 1), (FORWARD, "", 2), (FORWARD, "", 3)]).sample(steps=9, timeout_s=1.0)


def test_a_target_that_leaves_ends_the_recording(target):
    one = target([(FORWARD, "", 1)] * 9)
    one.page.set_state("detached")
    found = one.sample(seconds=60.0)
    assert found.ended
    assert 0 < found.seconds < 1


HOSTILE = '<script>alert("1")</script>&\x00\x1b\ud800'


@pytest.fixture
def hostile():
    modules = {
        1: ModuleEntry("(root)", HOSTILE, 1),
        2: ModuleEntry("a.b.c", "Linear", 1),
        3: ModuleEntry("x" * 1024, "Y", 2),
    }
    tracks = [
        Track(HOSTILE, 7, [(("forward", 1), 1.0), (("forward", 2), 2.0), (("forward", 99), 0.5)]),
        Track("second", 8, [(("data", 3), 0.25), (("other", 0), 3.25)]),
    ]
    return Recording(tracks, modules, 3.5, 700, 0.01, 4, ended=False)


def test_the_picture_is_well_formed_whatever_the_names_are(hostile):
    text = flame.svg(hostile, f"process 1: {HOSTILE}")
    root = ET.fromstring(text.encode())
    assert not [*root.iter(f"{SVG}script")]
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert titles[0] == "all: 7.000 s, 100.0%"
    assert titles[1].startswith('<script>alert("1")</script>&')
    assert "forward: 3.500 s, 50.0%" in titles
    assert "a.b.c (Linear): 2.000 s, 28.6%" in titles
    bars = dict(zip(titles, [*root.iter(f"{SVG}rect")][1:], strict=True))
    assert float(bars["forward: 3.500 s, 50.0%"].get("width")) == pytest.approx(590 - 0.5)
    ends = [float(bar.get("x")) + float(bar.get("width")) for bar in bars.values()]
    assert max(ends) <= flame.WIDTH - 10


def test_the_file_for_speedscope_adds_up_thread_by_thread(hostile):
    written = json.loads(json.dumps(flame.speedscope(hostile, "a job")))
    assert written["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = [frame["name"] for frame in written["shared"]["frames"]]
    first, second = written["profiles"]
    assert [one["type"] for one in (first, second)] == ["sampled", "sampled"]
    assert [[frames[at] for at in stack] for stack in first["samples"]] == [
        ["forward", f"(root) ({HOSTILE})"],
        ["forward", f"(root) ({HOSTILE})", "a.b.c (Linear)"],
        ["forward"],
    ]
    for profile in (first, second):
        assert len(profile["samples"]) == len(profile["weights"])
        assert profile["endValue"] - profile["startValue"] == pytest.approx(sum(profile["weights"]))
        assert profile["unit"] == "seconds"
    assert second["name"] == "second (8)"


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--seconds", "1", "--steps", "2"], "not both"),
        (["-o", "x.txt"], "ends neither in .svg nor in .json"),
        (["--rate", "0"], "Invalid value for '--rate'"),
    ],
)
def test_words_that_contradict_are_refused(words, reported, capsys):
    assert main(["record", str(os.getpid()), *words]) == 2
    assert reported in capsys.readouterr().err
