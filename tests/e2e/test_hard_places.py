"""Attach wherever a process may be: hookd enters it or refuses with a reason, and it always goes on unharmed.

Other cases are in test_inject.py (locks, threads, forks, malloc, pipes, the tracer's death) and in
test_attach_errors.py (stopped, zombie, not dumpable, seccomp of the tool).
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pluggy
import pytest

from hookd.errors import AttachError, HookdError, TargetUnsupported
from hookd.tool.attach import AttachRequest, attach, control, discover
from hookd.tool.linux import proc
from tests.support import forked, stub, training
from tests.support.environment import REPOSITORY, TARGETS, bare_python, target_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import Page

pytestmark = [pytest.mark.usefixtures("attachable")]

BUSY = "until_stopped(lambda: sum(range(500)))"
QUICK = AttachRequest(plugins=(), timeout_s=0.6)
FORCED = AttachRequest(plugins=(), timeout_s=6, force=True)
PATIENT = AttachRequest(plugins=(), timeout_s=60)

SECCOMP = """
import struct
def forbid(*numbers):
    op = lambda code, value, yes=0, no=0: struct.pack('HBBI', code, yes, no, value)
    program = op(0x20, 0) + b''.join(op(0x15, n, 0, 1) + op(0x06, 0x00050001) for n in numbers) + op(0x06, 0x7FFF0000)
    text = ctypes.create_string_buffer(program, len(program))
    filter = ctypes.create_string_buffer(struct.pack('H6xP', len(program) // 8, ctypes.addressof(text)), 16)
    libc, seccomp = ctypes.CDLL(None), {'x86_64': 317, 'aarch64': 277}[os.uname().machine]
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.syscall(seccomp, 1, 1, filter) == 0  # in all threads
"""

ENTERED = {
    "inside a signal handler": f"""
signal.signal(signal.SIGUSR1, lambda *_: {BUSY})
os.kill(os.getpid(), signal.SIGUSR1)
""",
    "2,000 threads with small stacks": f"""
threading.stack_size(1 << 16)
end = threading.Event()
for _ in range(2000):
    threading.Thread(target=end.wait, daemon=True).start()
{BUSY}
end.set()
assert threading.stack_size() == 1 << 16
""",
    "storm of execs": """
import subprocess
until_stopped(lambda: subprocess.run(['/bin/true'], check=True))
""",
    "timer signals": f"""
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
{BUSY}
signal.setitimer(signal.ITIMER_REAL, 0)
""",
    "in and out of a subinterpreter": """
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
other = interpreters.create()
until_stopped(lambda: (interpreters.run_string(other, 'sum(range(5000))'), sum(range(5000))))
interpreters.destroy(other)
""",
    "another interpreter is newer": f"""
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
newer = interpreters.create()
{BUSY}
interpreters.destroy(newer)
""",
    "a filter as Docker's": f"""
{SECCOMP}
forbid(*{{'x86_64': (101, 310, 311, 438, 165, 272), 'aarch64': (117, 270, 271, 438, 40, 97)}}[os.uname().machine])
{BUSY}
""",
}


@pytest.mark.parametrize("body", ENTERED.values(), ids=ENTERED.keys())
def test_it_is_entered_and_goes_on(tmp_path, body):
    with stub.start(tmp_path, body) as target:
        for _ in range(3):
            stub.inject(target.pid)
        stub.finish(target)


@pytest.mark.parametrize("name", ["libjemalloc.so.2", "libtcmalloc_minimal.so.4"])
def test_another_allocator_does_not_matter(tmp_path, name):
    found = next(Path("/usr/lib").glob(f"*/{name}"), None)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: libjemalloc2, libtcmalloc-minimal4)")
    body = "until_stopped(lambda: [bytearray(n * 97) for n in range(200)])"
    with stub.start(tmp_path, body, LD_PRELOAD=str(found)) as target:
        assert any(m.path == str(found.resolve()) for m in proc.maps(target.pid))
        for _ in range(5):
            stub.inject(target.pid)
        stub.finish(target)


@pytest.mark.skipif(importlib.util.find_spec("greenlet") is None, reason="greenlet is not installed")
def test_a_main_thread_that_runs_a_greenlet_is_entered(tmp_path):
    body = f"import greenlet\ngreenlet.greenlet(lambda: {BUSY}).switch()"
    home = stub.torch_directory(tmp_path)
    (home / "greenlet").symlink_to(Path(importlib.util.find_spec("greenlet").origin).parent)
    with stub.start(tmp_path, body) as target:
        stub.inject(target.pid)
        stub.finish(target)


WAITS = {
    "time.sleep": """
class Enough(Exception):
    pass
def enough(*_):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    raise Enough
def wake():
    sys.stdin.readline()
    while signal.getsignal(signal.SIGUSR1) is enough:  # one that comes as the attach lets go of the main thread may go to another
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
signal.signal(signal.SIGUSR1, enough)
threading.Thread(target=wake, daemon=True).start()
print('ready', flush=True)
try:
    time.sleep(1000)
except Enough:
    pass
""",
    "input": "print('ready', flush=True)\ninput()",
    "select": "import select\nprint('ready', flush=True)\nselect.select([0], [], [])\nsys.stdin.readline()",
    "join of a thread": """
other = threading.Thread(target=sys.stdin.readline, daemon=True)
other.start()
print('ready', flush=True)
other.join()
""",
}


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(body, marks=[pytest.mark.load] * (name in {"input", "select"}), id=name)
        for name, body in WAITS.items()
    ],
)
def test_a_wait_that_does_not_end_is_refused_and_entered_by_force(tmp_path, body):
    ends = "\nassert sys.hookd_starts == 1\ndone([i * i / 3.7 for i in range(1000)])"
    with stub.start(tmp_path, body + ends) as target:
        with pytest.raises(AttachError) as caught:
            stub.inject(target.pid, request=QUICK)
        assert caught.value.reason == "blocked"
        assert "system call" in caught.value.message
        assert "--force" in caught.value.hint
        stub.inject(target.pid, request=FORCED)
        stub.finish(target)


def test_a_main_thread_that_waits_for_the_others_to_end_is_entered_by_force(tmp_path):
    """After `sys.exit()`: before it ends, the interpreter joins all threads except daemon threads."""
    body = f"threading.Thread(target=lambda: {BUSY}).start()\nsys.exit()"
    with stub.start(tmp_path, body) as target:
        stub.inject(target.pid, request=FORCED)
        stub.finish(target)


def test_a_main_thread_that_has_exited_is_refused(tmp_path):
    """It calls pthread_exit; then /proc shows the process as a zombie, though its other threads work on."""
    body = f"""
pthread_exit = ctypes.CDLL(None).pthread_exit
def work():
    {BUSY}
    os._exit(0)
threading.Thread(target=work).start()
pthread_exit(None)
"""
    with stub.start(tmp_path, body) as target:
        wait_until(lambda: proc.status(target.pid).state == "Z")
        with pytest.raises(TargetUnsupported) as caught:
            stub.inject(target.pid)
        assert caught.value.reason == "main-thread-exited"
        stub.finish(target)


def test_a_held_import_lock_is_waited_for_and_what_came_too_late_does_nothing(tmp_path):
    body = f"""
import _imp
asked = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), asked.set()), daemon=True).start()
print('ready', flush=True)
_imp.acquire_lock()
while not asked.is_set():
    sum(range(500))
_imp.release_lock()
wanted = threading.active_count()
{BUSY}
assert getattr(sys, 'hookd_starts', 0) == 1
"""
    with stub.start(tmp_path, body) as target:
        with pytest.raises(AttachError) as caught:
            stub.inject(target.pid, request=QUICK)
        assert caught.value.reason == "timeout"
        target.send("go on")
        wait_until(lambda: target.out.count("ready") == 2)
        stub.inject(target.pid)
        stub.finish(target)


SHORT = """
import hashlib, json, threading, time, torch
def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(500))
class Slow:
    def __del__(self, work=work, time=time):
        work(0.01)
slow = [Slow() for _ in range(30)]
thread = threading.Thread(target=work, args=(0.5,))
thread.start()
work(0.4)
"""


@pytest.mark.load
def test_short_processes_end_as_ever_at_whatever_moment_of_their_lives_they_are_entered(tmp_path):
    """Moments from the import of `site` to the finalization; the stub's library is mapped at once, or they would be refused."""
    home = stub.torch_directory(tmp_path)
    (home / "sitecustomize.py").write_text("import torch\n")
    environment = target_environment(PYTHONPATH=str(home))
    chance = random.Random(3)
    reported: dict[str, int] = {}
    for _ in range(20):
        with Process([sys.executable, "-c", SHORT], env=environment) as target:
            time.sleep(chance.uniform(0, 0.7))  # not a condition to wait for: the test varies the moment
            try:
                stub.inject(target.pid, request=AttachRequest(plugins=(), timeout_s=2))
                reason = "ok"
            except HookdError as error:
                reason = error.reason
            reported[reason] = reported.get(reason, 0) + 1
            assert target.wait() == 0, target.describe()
            assert target.err == [], target.describe()
    assert set(reported) <= {"ok", "died", "not-initialized", "no-torch", "not-python", "zombie", "no-such-process"}, (
        reported
    )
    assert len(reported) > 1, f"always the same moment: {reported}"


EXECS = """
import os, sys
import torch
n = int(sys.argv[1])
sum(range(100000))
if n:
    os.execv(sys.executable, [sys.executable, '-c', sys.orig_argv[2], str(n - 1)])
print('done', flush=True)
"""


def test_a_process_that_becomes_another_program_all_the_time_is_not_harmed(tmp_path):
    home = stub.torch_directory(tmp_path)
    reported: dict[str, int] = {}
    with Process([sys.executable, "-c", EXECS, "60"], env=target_environment(PYTHONPATH=str(home))) as target:
        while target.popen.poll() is None:
            try:
                stub.inject(target.pid, request=QUICK)
                reason = "ok"
            except HookdError as error:
                reason = error.reason
            reported[reason] = reported.get(reason, 0) + 1
        assert target.finish() == ["done"]
        assert target.err == []
    assert reported.pop("internal", 0) == 0


@pytest.mark.parametrize("tracer", ["strace", "gdb"])
def test_under_another_tracer_it_is_refused_by_the_tracers_pid(tmp_path, tracer):
    if shutil.which(tracer) is None:
        pytest.skip(f"{tracer} is not installed")
    commands = {
        "strace": ["strace", "-qq", "-o", "/dev/null", "-p", "@"],
        "gdb": ["gdb", "-q", "-nx", "-ex", "set auto-solib-add off", "-p", "@"],
    }
    with stub.start(tmp_path, BUSY) as target:
        command = [str(target.pid) if word == "@" else word for word in commands[tracer]]
        with Process(command, env=target_environment(), stdin=True) as other:
            wait_until(lambda: proc.status(target.pid).tracer)
            with pytest.raises(AttachError) as caught:
                stub.inject(target.pid)
            assert caught.value.reason == "traced"
            assert str(other.pid) in caught.value.message
            if tracer == "gdb":  # killed in the middle it would leave the process stopped
                other.send("detach")
                other.send("quit")
            else:
                other.signal(signal.SIGTERM)
            other.wait()
        wait_until(lambda: not proc.status(target.pid).tracer and proc.status(target.pid).state not in "Tt")
        stub.inject(target.pid)
        stub.finish(target)


def test_a_free_threaded_build_is_refused(tmp_path):
    python = os.environ.get("HOOKD_FREE_THREADED_PYTHON")
    if not python:
        pytest.skip("HOOKD_FREE_THREADED_PYTHON names no free-threaded interpreter")
    home = stub.torch_directory(tmp_path)
    environment = target_environment(PYTHONPATH=str(home))
    with Process([python, "-c", stub.TRAIN + BUSY], env=environment, stdin=True) as target:
        target.expect("^ready$")
        with pytest.raises(TargetUnsupported) as caught:
            stub.inject(target.pid)
        assert caught.value.reason == "free-threaded"
        stub.finish(target)
    start = "from hookd.target.boot import bootstrap\ntry: bootstrap.start({})\nexcept Exception as error: print(error.reason)"
    path = os.pathsep.join(map(str, (REPOSITORY, Path(pluggy.__file__).parents[1])))
    with Process([python, "-c", start], env=target_environment(PYTHONPATH=path)) as embedded:
        assert embedded.finish() == ["free-threaded"]


# -- with the real torch


@pytest.mark.load
def test_a_stalled_collective_is_entered_by_force_and_comes_out_right(tmp_path):
    def rank(number: int) -> Process:
        command = [bare_python(), TARGETS / "stalled.py", str(number), tmp_path / "rendezvous"]
        return Process(command, env=training.environment(), stdin=True, popen=forked.start)

    with rank(0) as stalled, rank(1) as late:
        stalled.expect("^step 1 reduces$")
        late.expect("^step 1 reduces$")
        with pytest.raises(AttachError) as caught:
            attach(stalled.pid, AttachRequest(plugins=(), timeout_s=2))
        assert caught.value.reason == "blocked"
        assert "another rank" in caught.value.hint
        attach(stalled.pid, AttachRequest(plugins=(), timeout_s=10, force=True))
        with Page.of(stalled.pid) as page:
            for _ in range(3):
                late.send("come")
            lines = stalled.finish(), late.finish()
            assert page.values()["hookd_steps"][()] == 3
        assert [line for line in lines[0] if "sum" in line] == [line for line in lines[1] if "sum" in line]
        assert f"step 1 sum {4 * 4 * 2 * (1 + 2):.1f}" in lines[0]
        assert lines[0][-1] == lines[1][-1]
        assert (stalled.err, late.err) == ([], [])


BACKWARD = """
import hashlib, select, sys, time
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
w = torch.randn(256, 256, requires_grad=True)
start = torch.randn(256, 256)
def gradient():
    x, n = start, 0
    began = time.monotonic()
    while time.monotonic() - began < 1.0 if count is None else n < count:
        x, n = torch.tanh(x @ w), n + 1
    if count is not None:
        print('backward', flush=True)
    w.grad = None
    x.sum().backward()
    return n, hashlib.sha256(w.grad.numpy().tobytes()).hexdigest()
count = None
count, _ = gradient()
found = {gradient()[1]}
while not select.select([0], [], [], 0)[0]:
    found.add(gradient()[1])
print('same' if len(found) == 1 else 'different', flush=True)
"""


def test_a_long_backward_is_waited_for_and_gives_the_same_gradient():
    """The whole of it is one call without the interpreter's lock; it takes some seconds."""
    with Process([bare_python(), "-c", BACKWARD], env=training.environment(), stdin=True, popen=forked.start) as target:
        target.expect("^backward$")
        result = attach(target.pid, PATIENT)
        assert result.pause_s < 1
        seen = target.out.count("backward")
        wait_until(lambda: target.out.count("backward") > seen + 1, what="a backward with the agent")
        assert control.detach(target.pid)["restored"] == "identity"
        target.send("end")
        target.expect("^same$")
        target.finish()
        assert target.err == []


def test_an_attach_in_the_middle_of_the_import_of_torch_succeeds_after_it():
    with Process([bare_python(), TARGETS / "puppet.py"], env=training.environment(), stdin=True) as target:
        wait_until(lambda: any("libtorch" in m.path for m in proc.maps(target.pid)))
        assert "ready" not in target.out
        attach(target.pid, PATIENT)
        with Page.of(target.pid) as page:
            wait_until(lambda: page.values()["hookd_steps"][()] > 3)
        control.detach(target.pid)
        target.send("quit")
        target.finish()
        assert target.err == []


FILTERED = f"""
import ctypes, os, select, sys
import torch
{SECCOMP}
sockets, memfd = {{'x86_64': ((41, 53), (319,)), 'aarch64': ((198, 199), (279,))}}[os.uname().machine]
for numbers in (sockets, memfd):
    forbid(*numbers)
    print('forbidden', *numbers, flush=True)
    while not select.select([0], [], [], 0.01)[0]:
        pass
    sys.stdin.readline()
entry_of = ctypes.pythonapi.PyVectorcall_Function
entry_of.restype, entry_of.argtypes = ctypes.c_void_p, (ctypes.py_object,)
assert torch.nn.Module.__call__.__name__ == '_wrapped_call_impl', torch.nn.Module.__call__
assert entry_of(torch.nn.Module.__call__) == entry_of(lambda: None)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to read a filter")
@stub.queued
def test_a_filter_that_would_kill_is_seen_before_it_does(tmp_path):
    """The process proves at its end that the filter is a deadly one."""
    deadly = SECCOMP.replace("0x00050001", "0x80000000")
    body = f"{deadly}\nforbid({{'x86_64': 319, 'aarch64': 279}}[os.uname().machine])\n{BUSY}\nos.memfd_create('x')"
    with stub.start(tmp_path, body) as target:
        with pytest.raises(TargetUnsupported) as caught:
            stub.inject(target.pid)
        assert caught.value.reason == "seccomp-kills"
        assert "memfd_create" in caught.value.message
        target.send("end")
        assert target.wait() == -signal.SIGSYS
        assert target.out[-1] == stub.checksum()


def test_what_a_filter_takes_from_the_agent_is_named(tmp_path):
    with Process([bare_python(), "-c", FILTERED], env=training.environment(), stdin=True, popen=forked.start) as target:
        for pattern, reason in (("^forbidden 41|198", "no-socket"), ("^forbidden (319|279)", "no-memfd")):
            target.expect(pattern)
            with pytest.raises(HookdError) as caught:
                attach(target.pid, PATIENT)
            assert caught.value.reason == reason, caught.value
            assert discover.find_page(target.pid) is None
            target.send("next")
        target.finish()
        assert target.err == []
