"""Targets that go on living and do nothing, or something else than they should."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from tests.faults.scene import HANG_S, Said, fault

if TYPE_CHECKING:
    from tests.faults.scene import Scene

NOTHING = "nothing: the page is read without its help, and stays readable"


@fault(
    "A rank of two stalls in a forward, the other waits for it",
    f"time.sleep(86400) in a hook (hang_after_s {HANG_S:g})",
)
def stalls(scene: Scene) -> Said:
    scene.serve()
    _, second = scene.train(ranks=2)
    scene.strike(second, "stall")
    return scene.hears(r"hang in process ", lost=NOTHING)


@fault("A target is stopped", f"kill -STOP PID (hang_after_s {HANG_S:g})")
def stopped(scene: Scene) -> Said:
    scene.serve()
    (target,) = scene.train()
    scene.now()
    target.process.signal(signal.SIGSTOP)
    try:
        return scene.hears(rf"hang in process {target.pid} ", lost=NOTHING)
    finally:
        target.process.signal(signal.SIGCONT)


@fault("Native code holds the GIL", f"ctypes.PyDLL(None).sleep(86400) in a hook (hang_after_s {HANG_S:g})")
def gil(scene: Scene) -> Said:
    scene.serve()
    (target,) = scene.train()
    scene.strike(target, "gil")
    return scene.hears(rf"hang in process {target.pid} ", lost=NOTHING)


@fault("A rank of two is slow", "time.sleep(0.05) in a hook of each step")
def straggler(scene: Scene) -> Said:
    scene.serve()
    _, second = scene.train(ranks=2)
    scene.strike(second, "slow")
    return scene.hears(r"straggler in process ", lost="nothing")


@fault("A replica drifts", "one weight of one rank is changed; plugin drift:every=5")
def drift(scene: Scene) -> Said:
    scene.serve()
    _, second = scene.train("timing", "drift:every=5", ranks=2)
    scene.strike(second, "drift")
    return scene.hears(r"drift in process ", lost="nothing")


@fault("A NaN is born", "a forward hook multiplies a layer's output by NaN")
def nan(scene: Scene) -> Said:
    scene.serve()
    (target,) = scene.train()
    scene.strike(target, "nan")
    return scene.hears(rf"nan in process {target.pid} ", lost="nothing")
