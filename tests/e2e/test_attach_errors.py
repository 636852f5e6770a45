"""Every way in which an attach can fail: its exception, its reason, its exit code; and the target lives on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hookd import errors
from hookd.errors import HookdError, NoSuchTarget
from hookd.tool.attach import AttachRequest, attach, detach
from hookd.tool.linux.proc import link, maps, status
from tests.support import interpreters, made_up, stub
from tests.support.environment import REPOSITORY, target_environment, tool_environment
from tests.support.processes import Process, wait_until

pytestmark = [pytest.mark.usefixtures("attachable")]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root to have two users")
NOBODY = 65534
WORKING = "until_stopped(lambda: time.sleep(0.001))"
QUICK = AttachRequest(plugins=(), timeout_s=1.0)


def assert_fails(pid: int, kind: type[HookdError], reason: str, exit_code: int, request=QUICK) -> HookdError:
    with pytest.raises(HookdError) as caught:
        attach(pid, request)
    error = caught.value
    assert (type(error), error.reason, error.exit_code) == (kind, reason, exit_code), error
    assert str(pid) in error.message
    return error


def attach_as(pid: int, preparation: str) -> str:
    """Attach from another process, which first makes itself less privileged; return its message."""
    with Process([sys.executable, "-c", ATTACH, str(pid), preparation], env=tool_environment(), cwd=REPOSITORY) as tool:
        return tool.finish()[-1]


ATTACH = """
import ctypes, os, sys
from hookd.tool.attach import AttachRequest, attach, live
from hookd.tool.inject import helper, injector, selftest
from hookd.errors import HookdError
libc = ctypes.CDLL(None, use_errno=True)
exec(sys.argv[2])
try:
    attach(int(sys.argv[1]), AttachRequest(plugins=(), timeout_s=1.0))
except HookdError as error:
    print(type(error).__name__, error.reason, error.exit_code, bool(error.hint))
"""


def test_no_such_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert_fails(child.pid, errors.NoSuchTarget, "no-such-process", 4)


def test_zombie():
    child = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(lambda: status(child.pid).state == "Z")
    assert_fails(child.pid, errors.AttachError, "zombie", 1)
    child.wait()


def test_stopped(tmp_path):
    with stub.start(tmp_path, WORKING) as target:
        target.signal(signal.SIGSTOP)
        wait_until(lambda: status(target.pid).state == "T")
        error = assert_fails(target.pid, errors.AttachError, "stopped", 1)
        assert f"kill -CONT {target.pid}" in error.hint
        target.signal(signal.SIGCONT)
        stub.finish(target)


def test_traced(tmp_path):
    with stub.start(tmp_path, WORKING) as target:
        tracer = Process([sys.executable, "-c", TRACE, str(target.pid)], env=tool_environment(), stdin=True)
        with tracer:
            tracer.expect("^tracing$")
            error = assert_fails(target.pid, errors.AttachError, "traced", 1)
            assert str(tracer.pid) in error.message
            tracer.send("end")
            tracer.finish()
        stub.finish(target)


TRACE = """
import ctypes, sys
assert ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), None, None) == 0
print("tracing", flush=True)
sys.stdin.readline()
"""


def test_not_python():
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            wait_until(lambda: "sleep" in link(child.pid, "exe"))
            assert_fails(child.pid, errors.TargetUnsupported, "not-python", 6)
        finally:
            child.kill()


def test_a_32_bit_program(tmp_path):
    """The smallest possible one: it calls pause(2) for ever."""
    program = tmp_path / "pause32"
    code = bytes.fromhex("b81d000000 cd80 ebf7")  # mov $29, %eax; int $0x80; jmp back
    base, entry = 0x08048000, 0x08048000 + 84
    header = b"\x7fELF\1\1\1".ljust(16, b"\0")
    words = [2 | 3 << 16, 1, entry, 52, 0, 0, 52 | 32 << 16, 1, 0]
    load = [1, 0, base, base, 84 + len(code), 84 + len(code), 5, 4096]
    program.write_bytes(header + b"".join(w.to_bytes(4, "little") for w in words + load) + code)
    program.chmod(0o755)
    try:
        child = subprocess.Popen([program])
    except OSError:
        pytest.skip("this kernel runs no 32-bit programs")
    try:
        wait_until(lambda: any(one.path == str(program) for one in maps(child.pid)))  # its execve is over
        assert_fails(child.pid, errors.TargetUnsupported, "32-bit", 6)
    finally:
        child.kill()
        child.wait()


def test_python_without_torch(tmp_path):
    command = [sys.executable, "-c", stub.TRAIN.replace("import torch\n", "") + WORKING]
    with Process(command, env=target_environment(), cwd=tmp_path, stdin=True) as target:
        target.expect("^ready$")
        assert_fails(target.pid, errors.TargetUnsupported, "no-torch", 6)
        stub.finish(target)


def test_a_version_that_is_not_served(tmp_path, monkeypatch):
    """The test moves only the bounds: the version is read from the real process."""
    monkeypatch.setattr("hookd.tool.inject.interpreter.OLDEST_PYTHON", (3, 99))
    with stub.start(tmp_path, WORKING) as target:
        error = assert_fails(target.pid, errors.TargetUnsupported, "python-version", 6)
        assert f"Python {sys.version_info[0]}.{sys.version_info[1]}" in error.message
        stub.finish(target)


def test_a_newer_version_that_is_built_otherwise(tmp_path):
    """The interpreter is ours, but claims a version that does not exist: it has no table, or that of another version."""
    python = interpreters.at(sys.executable)
    assert python is not None
    with made_up.start(tmp_path, WORKING, python, resized=8) as target:
        error = assert_fails(target.pid, errors.TargetUnsupported, "python-version", 6)
        assert "newer than any that hookd was tried on" in error.message
        assert "debug table" in error.message
        stub.inject(target.pid, request=AttachRequest(plugins=(), timeout_s=60, force=True))
        stub.finish(target)


def test_disabled(tmp_path):
    with stub.start(tmp_path, WORKING, HOOKD_DISABLE="1") as target:
        assert_fails(target.pid, errors.TargetUnsupported, "disabled", 6)
        stub.finish(target)


@needs_root
def test_other_user(tmp_path):
    with stub.start(tmp_path, WORKING) as target:
        assert attach_as(target.pid, f"os.setuid({NOBODY})") == "PermissionDenied other-user 5 True"
        stub.finish(target)


@needs_root
def test_not_dumpable(tmp_path):
    with stub.start(tmp_path, f"os.setuid({NOBODY})\n{WORKING}") as target:  # which also makes it not dumpable
        assert attach_as(target.pid, f"os.setuid({NOBODY})") == "PermissionDenied not-dumpable 5 True"
        stub.finish(target)


@needs_root
def test_ptrace_refused(tmp_path):
    dumpable = "assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0"
    with stub.start(tmp_path, f"os.setuid({NOBODY})\n{dumpable}\n{WORKING}") as target:
        assert attach_as(target.pid, WITHOUT_CAPABILITIES) == "PermissionDenied ptrace-refused 5 True"
        stub.finish(target)


WITHOUT_CAPABILITIES = "assert libc.syscall(126, (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0"


@pytest.mark.parametrize(("number", "name"), [(1, "EPERM"), (38, "ENOSYS")])
@stub.queued
def test_ptrace_forbidden_by_seccomp(tmp_path, number, name):
    """The injector inherits the filter: ptrace fails there with `number`, all other calls are allowed."""
    wanted = {"EPERM": "PermissionDenied ptrace-refused 5 True", "ENOSYS": "PermissionDenied seccomp 5 True"}[name]
    with stub.start(tmp_path, WORKING) as target:
        assert attach_as(target.pid, SECCOMP.replace("@ERRNO@", str(number))) == wanted
        stub.finish(target)


SECCOMP = """
import struct
def op(code, value, yes=0, no=0):
    return struct.pack("HBBI", code, yes, no, value)
ptrace = {"x86_64": 101, "aarch64": 117}[os.uname().machine]
program = op(0x20, 0) + op(0x15, ptrace, 0, 1) + op(0x06, 0x00050000 | @ERRNO@) + op(0x06, 0x7FFF0000)
text = ctypes.create_string_buffer(program, len(program))
filter = ctypes.create_string_buffer(struct.pack("H6xP", 4, ctypes.addressof(text)), 16)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, filter, 0, 0) == 0
"""


def test_yama(tmp_path, monkeypatch):
    """The test makes the kernel's refusal as with Yama's scope at 2; the message is hookd's."""
    scope = tmp_path / "ptrace_scope"
    scope.write_text("2\n")
    monkeypatch.setattr("hookd.tool.linux.permission._YAMA", scope)
    monkeypatch.setattr("hookd.tool.linux.permission._has_capability", lambda: False)
    monkeypatch.setattr("hookd.tool.attach.environment.of", _refused)
    with stub.start(tmp_path, WORKING) as target:
        error = assert_fails(target.pid, errors.PermissionDenied, "yama", 5)
        assert "ptrace_scope" in error.hint
        stub.finish(target)


def _refused(pid: int) -> dict[str, str]:
    raise PermissionError(1, f"refused for {pid}")


def test_blocked_outside_the_interpreter(tmp_path):
    body = """
print('ready', flush=True)
ctypes.PyDLL(None).poll((ctypes.c_int * 2)(0, 1), 1, -1)
sys.stdin.readline()
done([i * i / 3.7 for i in range(1000)])
"""
    with stub.start(tmp_path, body) as target:
        error = assert_fails(target.pid, errors.AttachError, "blocked", 1)
        assert "system call" in error.message
        stub.finish(target)


def test_timeout(tmp_path):
    """The code has run, but the agent cannot start: the import of torch does not end in time."""
    home = stub.torch_directory(tmp_path)
    (home / "torch" / "nn" / "modules" / "module.py").write_text(IMPORTS_SLOWLY)
    with stub.start(tmp_path, WORKING) as target:
        error = assert_fails(target.pid, errors.AttachError, "timeout", 1)
        assert "--timeout" in error.hint
        target.send("go on")
        wait_until(lambda: target.out.count("ready") == 2)
        stub.finish(target)


IMPORTS_SLOWLY = """
import sys, threading
asked = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), asked.set()), daemon=True).start()
print('ready', flush=True)
while not asked.is_set():
    sum(range(500))
class Module:
    pass
"""


@stub.queued
def test_died_in_the_middle(tmp_path):
    body = """
pause = ctypes.CDLL(None).pause
threading.Thread(target=lambda: (sys.stdin.readline(), os._exit(3)), daemon=True).start()
time.sleep(0.1)
print('ready', flush=True)
pause()
"""
    with stub.start(tmp_path, body) as target:
        with Process(
            [sys.executable, "-c", ATTACH.replace("1.0", "30.0"), str(target.pid), ""], env=tool_environment()
        ) as tool:
            before = stub.size(target.pid)
            wait_until(lambda: stub.size(target.pid) > before, what="the code is queued")
            target.send("end")
            assert tool.finish()[-1] == "AttachError died 1 False"
        assert target.wait() == 3


def test_detach_where_nothing_is_attached(tmp_path):
    with stub.start(tmp_path, WORKING) as target:
        with pytest.raises(NoSuchTarget) as caught:
            detach(target.pid)
        assert (caught.value.reason, caught.value.exit_code) == ("not-attached", 4)
        stub.finish(target)


AGENT_OF_ANOTHER_VERSION = b"""
def start(config, loader=None):
    import os
    global page
    from hookd.wire.page import PageWriter
    ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
    page = PageWriter.create({"agent_version": "0.0.1", "pid": os.getpid(), "start_ticks": ticks, "control": ""})
"""


def test_an_agent_of_another_version_is_there(tmp_path, monkeypatch):
    sources = [REPOSITORY / "hookd/errors.py", *(REPOSITORY / "hookd/wire").rglob("*.py")]
    files = {path.relative_to(REPOSITORY).as_posix(): path.read_bytes() for path in sources}
    pack = stub.payload._pack
    monkeypatch.setattr(stub.payload, "_pack", lambda made: pack({**files, **made}))
    with stub.start(tmp_path, WORKING) as target:
        stub.inject(target.pid, AGENT_OF_ANOTHER_VERSION)
        error = assert_fails(target.pid, errors.AttachError, "agent-version", 1)
        assert "0.0.1" in error.message
        assert f"hookd detach {target.pid}" in error.hint
        stub.finish(target)
