"""Looking at the stacks of threads that go on meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from hookd.wire import frames
from tests.support import interpreters
from tests.support.environment import target_environment

# A collection whose callbacks let other threads go on, at each object that is made: as weak references' callbacks do.
PROGRAM = """
import gc, sys, threading, time
from hookd.wire.frames import innermost_frames

def deep(n):
    return deep(n - 1) if n else sum([1, 2, 3])

def wide(*values, **more):
    a = b = c = d = e = f = {}
    return sorted(values), len(more), [len(x) for x in (a, b, c, d, e, f)]

def run():
    while not stop:
        for depth in range(12):
            deep(depth)
            wide(depth, True, False, x={})

stop, walked = False, 0
thread = threading.Thread(target=run)
thread.start()
gc.callbacks.append(lambda *_: time.sleep(0))
gc.set_threshold(1, 1, 1)
try:
    for _ in range(100):
        with innermost_frames() as found:
            top = found.get(thread.ident)
            while top is not None:
                walked += len(top.f_code.co_name)
                top = top.f_back
finally:
    gc.disable()
    stop = True
    thread.join()
print("walked", walked > 0)
"""


def test_a_collection_in_the_middle_of_a_walk_does_no_harm() -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "walked True\n"), done.stderr


@pytest.mark.parametrize("is_enabled", [True, False])
def test_whether_garbage_is_collected_is_as_before(monkeypatch, is_enabled: bool) -> None:
    monkeypatch.setattr(frames, "_MAKES_FRAMES", True)
    before = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with frames.innermost_frames(), frames.innermost_frames():
            assert not gc.isenabled()
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if before else gc.disable)()


LEAVES = """
import gc, runpy, sys
innermost_frames = runpy.run_path(sys.argv[1])["innermost_frames"]  # alone: hookd needs pluggy

def look():
    with innermost_frames() as seen:
        return len(seen)

look()
gc.collect()
gc.disable()
look()
print("garbage", gc.collect())
"""


@pytest.mark.parametrize("minor", interpreters.VERSIONS, ids=str)
def test_no_cycle_is_left_behind(minor) -> None:
    """From CPython 3.12 on, the caller's own frame is among those that are looked at."""
    here = [one for one in interpreters.found() if one.minor == minor and one.root == interpreters.HERE]
    if not here:
        pytest.skip(f"no CPython {minor[0]}.{minor[1]} on this machine")
    command = [*here[0].command, "-c", LEAVES, frames.__file__]
    done = subprocess.run(command, env=target_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "garbage 0\n", done.stdout + done.stderr
