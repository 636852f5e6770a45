"""Faults in hookd's own parts of a target: a plugin, the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from hookd.errors import HookdError
from tests.faults.scene import NOTHING, Said, fault
from tests.support.processes import wait_until

if TYPE_CHECKING:
    from tests.faults.scene import Scene

RAISES = """
from hookd import Plugin, hookimpl
class Bad(Plugin):
    name = "bad"
    @hookimpl
    def forward(self, module):
        raise ValueError("a plugin's own mistake")
"""
SLEEPS = """
import time
from hookd import Plugin, hookimpl
class Bad(Plugin):
    name = "bad"
    @hookimpl
    def forward(self, module):
        time.sleep(0.01)
"""


@fault("A plugin raises at every event", "raise ValueError in its forward hook")
def plugin_raises(scene: Scene) -> Said:
    return _bad(scene, RAISES)


@fault("A plugin is slow", "time.sleep(0.01) in its forward hook")
def plugin_sleeps(scene: Scene) -> Said:
    return _bad(scene, SLEEPS)


def _bad(scene: Scene, text: str) -> Said:
    """Load a plugin that misbehaves beside a good one, and wait until /metrics shows its quarantine."""
    (scene.home / "bad.py").write_text(text)
    scene.serve("--plugin-dir", scene.home)
    (target,) = scene.train("timing")
    scene.now()
    scene.daemon.client.change_plugins(target.pid, "load", "bad", timeout_s=30)
    quarantined = r'hookd_plugin_state\{plugin="bad",.*state="quarantined"\} 1'
    said = scene.shows(quarantined, lost="nothing: the training and the other plugins go on")
    before = scene.steps(target)
    wait_until(lambda: scene.steps(target) > before + 5, what="the training goes on")
    return said


@fault("A page is overwritten", "4,000 bytes of 0xff over its head, by its own process")
def page_spoilt(scene: Scene) -> Said:
    scene.serve()
    herd = scene.herd()
    bad, _ = herd.start(2, "job")
    wait_until(lambda: len(scene.daemon.client.targets()) == 2, what="discovery")
    scene.now()
    herd.signal(bad, "spoil")
    said = scene.hears(
        rf"corrupt in process {bad} ", lost="what this page received since the last poll; no other target's"
    )
    assert scene.daemon.metrics().total("hookd_target_up") == 1
    return said


@fault("A page cannot be made", "prlimit --pid PID --fsize=100000, then hookd attach PID")
def page_refused(scene: Scene) -> Said:
    scene.serve()
    (target,) = scene.train(attach=False)
    psutil.Process(target.pid).rlimit(psutil.RLIMIT_FSIZE, (100_000, 100_000))
    scene.now()
    try:
        scene.daemon.client.attach(target.pid, timeout_s=30, plugins=["timing"])
    except HookdError as exc:
        seconds = scene.elapsed()
        target.process.ask("step", r"^stepped \d+$")
        return Said(f"error: {exc.message} ({exc.reason})", seconds, "nothing: the training goes on without an agent")
    return Said(NOTHING, None, "")
