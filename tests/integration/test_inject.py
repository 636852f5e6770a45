"""The injection itself, on real processes with a stub for the agent: it runs, and the process is not harmed."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys

import pytest

from hookd.errors import AttachError
from hookd.tool.attach.request import AttachRequest
from hookd.tool.linux import proc
from tests.support import stub
from tests.support.environment import REPOSITORY, tool_environment
from tests.support.processes import Process, wait_until

FORKS = """
import warnings
warnings.filterwarnings('ignore', 'This process')  # it has a thread of its own, and forks
"""
BODIES = {
    "busy": stub.EXACT + "until_stopped(step)",
    "sleeping": """
def step():
    before = time.monotonic()
    time.sleep(0.05)
    assert time.monotonic() - before >= 0.05
until_stopped(step)
""",
    "waiting for locks": """
lock = threading.Lock()
lock.acquire()
until_stopped(lambda: lock.acquire(timeout=0.02))
""",
    "many threads": stub.EXACT
    + """
def forever():
    while True:
        sum(range(200))
for _ in range(3):
    threading.Thread(target=forever, daemon=True).start()
until_stopped(step)
""",
    "forking": FORKS
    + """
def step():
    child = os.fork()
    if not child:
        os._exit(hasattr(sys, 'hookd_starts') and sys.hookd_starts > 1000)
    assert os.waitpid(child, 0)[1] == 0
until_stopped(step)
""",
    "allocating": "until_stopped(lambda: [bytearray(n * 97) for n in range(200)])",
    "waiting for input": """
ours, theirs = os.pipe()
def feed():
    while True:
        time.sleep(0.01)
        os.write(theirs, b'x')
threading.Thread(target=feed, daemon=True).start()
until_stopped(lambda: os.read(ours, 1))
""",
}


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(body, marks=[pytest.mark.load] * (name in {"allocating", "many threads", "sleeping"}), id=name)
        for name, body in BODIES.items()
    ],
)
def test_a_target_does_not_notice_ten_injections(tmp_path, body):
    with stub.start(tmp_path, body) as target:
        for _ in range(10):
            assert stub.inject(target.pid).pause_s < 1
        stub.finish(target)


@stub.queued  # else nothing is stopped
def test_who_holds_the_process_for_moments_is_waited_for(tmp_path):
    """Another hookd that attaches, a py-spy that takes a sample."""
    with stub.start(tmp_path, BODIES["busy"]) as target:
        environment = {**tool_environment(), "PYTHONPATH": str(REPOSITORY)}
        with Process([sys.executable, "-c", RIVAL, str(target.pid)], env=environment, cwd=tmp_path) as rival:
            rival.expect("^traced$")
            for _ in range(10):
                assert stub.inject(target.pid).pause_s < 1
            assert rival.popen.poll() is None, rival.describe()
        stub.finish(target)


RIVAL = """
import contextlib, os, sys, time
from hookd.tool.inject.ptrace import CONT, DETACH, INTERRUPT, SEIZE, request
pid = int(sys.argv[1])
while True:
    with contextlib.suppress(OSError):  # the other's turn
        request(SEIZE, pid)
        request(INTERRUPT, pid)
        while os.waitpid(pid, 0x40000000)[1] >> 16 != 128:  # a signal on its way is passed on
            request(CONT, pid)
        time.sleep(0.005)
        request(DETACH, pid)
        print("traced", flush=True)
    time.sleep(0.005)
"""


@pytest.mark.xfail(
    strict=True,
    reason="what PyRun_SimpleString raises before our first line runs, nobody can catch, and no audit hook is seen from outside",
)
def test_an_audit_hook_that_refuses_to_execute_anything_is_no_harm(tmp_path):
    body = """
def refuse(event, _):
    if event == 'exec':
        raise RuntimeError(event)
sys.addaudithook(refuse)
"""
    with stub.start(tmp_path, body + BODIES["busy"]) as target:
        with contextlib.suppress(AttachError):
            stub.inject(target.pid)
        stub.finish(target)


def test_nothing_is_left_in_the_target(tmp_path):
    with stub.start(tmp_path, BODIES["busy"]) as target:
        before = stub.threads(target.pid)
        for _ in range(10):
            stub.inject(target.pid)
        wait_until(lambda: stub.threads(target.pid) == before, what="the threads end")
        assert stub.mailboxes(target.pid) == 0
        stub.finish(target)


@stub.queued
def test_a_mailbox_whose_code_may_still_be_queued_stays(tmp_path):
    with stub.start(tmp_path, BLOCKED) as target:
        with pytest.raises(AttachError):
            stub.inject(target.pid, request=AttachRequest(plugins=(), timeout_s=1))
        assert stub.mailboxes(target.pid) == 1
        stub.finish(target)


def test_no_signal_is_lost(tmp_path):
    """Each is sent when the one before has been counted: CPython itself takes two that are pending for one."""
    with stub.start(tmp_path, COUNTS_SIGNALS) as target:
        with Process([sys.executable, "-c", SENDER, str(target.pid)], env=tool_environment(), cwd=tmp_path) as sender:
            sender.expect("^sending$")
            for _ in range(10):
                wait_until(lambda: injected(target.pid), what="a stop, on a busy machine")
                assert sender.popen.poll() is None, sender.describe()
            (tmp_path / "enough").touch()
            sender.finish()
        stub.finish(target)


def injected(pid):
    """Inject; return False if a busy machine did not stop the target in time, which is to be tried again."""
    try:
        stub.inject(pid)
    except AttachError as error:
        if error.reason != "blocked":
            raise
        return False
    return True


COUNTS_SIGNALS = """
seen = 0
file = os.open('seen', os.O_RDWR | os.O_CREAT)
def count(number, frame):
    global seen
    seen += 1
    os.pwrite(file, seen.to_bytes(4, 'little'), 0)
signal.signal(signal.SIGUSR1, count)
until_stopped(lambda: sum(range(500)))
"""
SENDER = """
import os, signal, sys, time
pid = int(sys.argv[1])
file = os.open('seen', os.O_RDONLY)
print('sending', flush=True)
number = 0
while not os.path.exists('enough'):
    os.kill(pid, signal.SIGUSR1)
    number += 1
    patience = time.monotonic() + 60
    while int.from_bytes(os.pread(file, 4, 0), 'little') != number:
        assert time.monotonic() < patience, f'signal {number} was lost'
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only there the way back is on the stack")
def test_the_target_survives_the_tracer_whenever_it_dies(tmp_path):
    """The injector is ended before each of its ptrace requests in turn."""
    with stub.start(tmp_path, BODIES["busy"]) as target:
        killer = Process([sys.executable, "-c", KILLER, str(target.pid)], env=tool_environment(), cwd=REPOSITORY)
        with killer:
            assert int(killer.finish()[-1]) > 20
        stub.inject(target.pid)
        stub.finish(target)


KILLER = """
import os, sys, time
from hookd.tool.inject import injector, ptrace, queued_source, selftest
from hookd.tool.linux import proc
from hookd.tool.attach import target
found = target.inspect(int(sys.argv[1]))
selftest.check = lambda: None
request = ptrace.request
code = queued_source.code(found.status.nspid, 5, 0.1)
job = injector.Job(
    found.pid, found.ticks, found.program, found.memory.fd, found.python.symbols, found.python.returns, code, 5, 65536, 5.0
)
last = -1
code = 9
while code == 9:
    last += 1
    child = os.fork()
    if not child:
        made = 0
        def counted(*arguments):
            global made
            made += 1
            if made > last:
                os._exit(9)
            request(*arguments)
        ptrace.request = counted
        injector.run(job)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    proc.require_alive(found.pid, found.ticks)
    time.sleep(0.02)
assert code == 0, code
print(last)
"""


def test_a_forked_child_does_not_run_what_was_queued_for_its_parent(tmp_path):
    body = (
        FORKS
        + """
def step():
    child = os.fork()
    if not child:
        for _ in range(50):
            sum(range(100))
        os._exit(len(sys._current_frames()) > 1)
    assert os.waitpid(child, 0)[1] == 0
until_stopped(step)
"""
    )
    with stub.start(tmp_path, body) as target:
        for _ in range(20):
            stub.inject(target.pid)
        stub.finish(target)


BLOCKED = """
libc = ctypes.PyDLL(None)  # keeps the interpreter's lock
ours, theirs = os.pipe()
print('ready', flush=True)
libc.poll((ctypes.c_int * 2)(0, 1), 1, -1)  # until stdin has a line
sys.stdin.readline()
for _ in range(1000):
    sum(range(100))
time.sleep(0.3)
assert not hasattr(sys, 'hookd_starts')
assert threading.active_count() == 1
done([i * i / 3.7 for i in range(1000)])
"""


def test_a_blocked_main_thread_is_reported_and_what_was_queued_does_nothing_later(tmp_path):
    with stub.start(tmp_path, BLOCKED) as target:
        with pytest.raises(AttachError) as caught:
            stub.inject(target.pid, request=AttachRequest(plugins=(), timeout_s=1))
        assert caught.value.reason == "blocked"
        assert "poll" in str(caught.value)
        stub.finish(target)


HANGS = """
libc = ctypes.CDLL(None)  # gives the interpreter's lock away
print('ready', flush=True)
libc.poll((ctypes.c_int * 2)(0, 1), 1, -1)
sys.stdin.readline()
assert sys.hookd_starts == 1
done([i * i / 3.7 for i in range(1000)])
"""


def test_force_reaches_a_main_thread_that_hangs_outside_the_interpreter(tmp_path):
    with stub.start(tmp_path, HANGS) as target:
        stub.inject(target.pid, request=AttachRequest(plugins=(), timeout_s=6, force=True))
        stub.finish(target)


def test_force_leaves_a_thread_alone_that_holds_the_interpreters_lock(tmp_path):
    with stub.start(tmp_path, BLOCKED) as target:
        with pytest.raises(AttachError) as caught:
            stub.inject(target.pid, request=AttachRequest(plugins=(), timeout_s=1, force=True))
        assert caught.value.reason == "blocked"
        stub.finish(target)


def test_an_attach_during_the_import_of_torch_waits_for_its_end(tmp_path):
    home = stub.torch_directory(tmp_path)
    slow = "import sys\nprint('ready', flush=True)\nsys.stdin.readline()\nclass Module: pass\n"
    (home / "torch" / "nn" / "modules" / "module.py").write_text(slow)
    body = "until_stopped(lambda: sum(range(100)))"
    with stub.start(tmp_path, body) as target:
        with pytest.raises(AttachError) as caught:  # the import never ends, because the main thread waits for a line
            stub.inject(target.pid, request=AttachRequest(plugins=(), timeout_s=1))
        assert caught.value.reason in ("blocked", "timeout")
        target.send("go on")
        wait_until(lambda: target.out.count("ready") == 2)
        stub.inject(target.pid)
        stub.finish(target)


INTERRUPTED = """
import posix
class Preempted(Exception):
    pass
class Posix:
    def getpid(self):
        raise Preempted  # as a signal handler of the program would, called in the middle of the injected code
seen = 0
def step():
    global seen
    try:
        while not seen:  # like any handler's, the exception may come between any two instructions: wait for it in here
            sum(range(500))
    except Preempted:
        seen += 1
        sys.modules['posix'] = posix
sys.modules['posix'] = Posix()
until_stopped(step)
assert seen == 1
"""


@stub.queued
def test_an_exception_of_the_programs_own_signal_handler_reaches_the_program(tmp_path):
    with stub.start(tmp_path, INTERRUPTED) as target:
        stub.inject(target.pid, request=AttachRequest(plugins=(), timeout_s=12))  # the second queueing is answered
        stub.finish(target)


FAILS = b"""
def start(config, loader=None):
    from hookd.target import missing
"""
REFUSES = b"""
class Refusal(Exception):
    reason = "some-reason"
    hint = "some hint"
def start(config, loader=None):
    raise Refusal("some message")
"""


def test_an_agent_that_fails_tells_its_traceback_and_leaves_no_module(tmp_path):
    body = BODIES["busy"] + "\nassert not [name for name in sys.modules if name.lstrip('_').startswith('hookd')]"
    with stub.start(tmp_path, body) as target:
        with pytest.raises(AttachError) as caught:
            stub.inject(target.pid, FAILS)
        assert caught.value.reason == "agent-failed"
        assert "missing" in str(caught.value)
        stub.finish(target)


def test_an_agent_that_refuses_is_quoted(tmp_path):
    with stub.start(tmp_path, BODIES["busy"]) as target:
        with pytest.raises(AttachError) as caught:
            stub.inject(target.pid, REFUSES)
        assert (caught.value.reason, caught.value.hint, str(caught.value)) == (
            "some-reason",
            "some hint",
            "some message",
        )
        stub.finish(target)


@stub.queued
def test_a_target_that_dies_meanwhile_is_said_to_have_died(tmp_path):
    with stub.start(tmp_path, BLOCKED) as target:
        kills = Process([sys.executable, "-c", KILL_WHEN_QUEUED, str(target.pid)], env=tool_environment())
        with kills:
            kills.expect("^watching$")
            with pytest.raises(AttachError) as caught:
                stub.inject(target.pid)
            kills.finish()
        assert caught.value.reason == "died"
        assert target.wait() == -signal.SIGKILL


KILL_WHEN_QUEUED = """
import os, signal, sys, time
pid = int(sys.argv[1])
size = lambda: int(open(f'/proc/{pid}/statm').read().split()[0])
before = size()
print('watching', flush=True)
while size() == before:
    time.sleep(0.001)
time.sleep(0.05)
os.kill(pid, signal.SIGKILL)
"""


def test_what_the_injector_says_to_be_gone_is_gone():
    with pytest.raises(AttachError) as caught:
        proc.require_alive(os.getpid(), 1)
    assert caught.value.reason == "died"
