"""Targets that end."""

from __future__ import annotations

import os
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.faults.scene import Impossible, fault, root
from tests.support import training
from tests.support.cgroup import remove
from tests.support.processes import Process, wait_until
from tests.support.training import Job

if TYPE_CHECKING:
    from tests.faults.scene import Said, Scene


def _ends(scene: Scene, what: str, number: int = 0) -> Said:
    """End a target; return what hookd said about it, and which of its counters are still served."""
    scene.serve()
    (target,) = scene.train()
    before = scene.steps(target)
    scene.now()
    if number:
        target.process.signal(number)
    else:
        target.process.send(what)
    said = scene.hears(rf"lost in process {target.pid} ", lost="")
    return replace(said, lost=scene.kept(target, before))


@fault("A target is killed", "kill -9 PID")
def kill(scene: Scene) -> Said:
    return _ends(scene, "", signal.SIGKILL)


@fault("A target accesses memory that is not there", "ctypes.string_at(0)")
def segfault(scene: Scene) -> Said:
    return _ends(scene, "segfault")


@fault("A library aborts", "os.abort()")
def abort(scene: Scene) -> Said:
    return _ends(scene, "abort")


@fault("A target ends without Python's own exit", "os._exit(3)")
def exits(scene: Scene) -> Said:
    return _ends(scene, "exit")


@fault("An exception that nobody catches", "raise RuntimeError('planted fault')")
def raises(scene: Scene) -> Said:
    return _ends(scene, "raise")


@fault("The OOM killer kills it", "a cgroup with memory.limit_in_bytes (memory.max); the target fills it")
def oom(scene: Scene) -> Said:
    root()
    scene.serve()
    (target,) = scene.train(attach=False)
    group = _memory_cgroup(f"hookd-fault-{os.getpid()}", psutil.Process(target.pid).memory_info().rss + (256 << 20))
    try:
        (group / "cgroup.procs").write_text(str(target.pid))
        scene.attach([target])
        before = scene.steps(target)
        scene.strike(target, "oom")
        wait_until(lambda: target.process.popen.poll() is not None, what="the kernel kills it")
        scene.now()
        said = scene.hears(rf"(lost|oom) in process {target.pid} ", lost="")
        return replace(said, lost=scene.kept(target, before))
    finally:
        target.process.close()
        remove(group)


def _memory_cgroup(name: str, limit: int) -> Path:
    """Make a cgroup with a limit, of either version."""
    for parent, file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = parent / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(limit))
        except OSError:
            group.rmdir()
        else:
            return group
    raise Impossible("no memory cgroup can be made")


@fault("A container is killed", "kill -9 of its first process (unshare --pid --fork)")
def container(scene: Scene) -> Said:
    root()
    scene.serve()
    job = Job("doomed.py").command()
    inner = f"exec 3<&0; {shlex.join(map(str, job))} <&3 & wait"
    command = ["unshare", "--pid", "--fork", "--mount-proc", "bash", "-c", inner]
    box = Process(command, env=training.environment(HOOKD_RUN="job"), stdin=True)
    scene.stack.callback(box.close)
    box.expect("^ready$")
    first = psutil.Process(box.pid).children()[0]
    target = first.children()[0]
    scene.daemon.client.attach(target.pid, timeout_s=30, plugins=["timing"])
    wait_until(lambda: scene.daemon.rows("job"), what="discovery")
    scene.now()
    first.kill()
    return scene.hears(rf"lost in process {target.pid} ", lost="nothing: its counters are served for the linger time")
