"""`hookd doctor PID` on real processes, each with something in the way, and its one screen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from hookd.native import build
from hookd.tool.attach import AttachRequest, Control, attach, detach
from hookd.tool.cli import checks, target_checks
from hookd.tool.config import PluginSpec
from tests.e2e.test_upgrade import Other, keep
from tests.support import forked, stub, tool, training
from tests.support.environment import tool_environment
from tests.support.processes import Process, wait_until
from tests.support.training import Job

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]

WORKING = "until_stopped(lambda: time.sleep(0.001))"


def doctor(pid: int, *, status: int) -> dict[str, dict[str, str]]:
    """Return the checks by name; check that the output for a person fits one screen."""
    screen = tool.hookd("doctor", str(pid), status=status).split("\n")
    assert len(screen) <= 24, screen
    assert max(map(len, screen)) <= 80, screen
    answer = json.loads(tool.hookd("doctor", str(pid), "--json", status=status))
    assert answer["ok"] == (status == 0)
    return {check["name"]: check for check in answer["checks"]}


def test_a_training_process_and_who_holds_its_agent(tmp_path):
    with Process(Job("puppet.py").command(), env=training.environment(), stdin=True, popen=forked.start) as target:
        target.expect("^ready$")
        found = doctor(target.pid, status=0)
        assert found["Python"]["found"].startswith(f"CPython {sys.version_info[0]}.{sys.version_info[1]}")
        assert "agent" not in found
        with tool.Attachment([target.pid], "-p", "timing") as foreground:
            foreground.process.expect("^metrics on")
            found = doctor(target.pid, status=0)
            assert f"held by hookd attach {foreground.process.pid} ({foreground.url})" in found["agent"]["found"]
            assert found["calls"] == {
                "name": "calls",
                "state": "ok",
                "found": "module calls are handled in C",
                "cure": "",
            }
            reported = (
                f"serves {target.pid} on {foreground.url}/metrics",
                "hookd status lists them",
            )  # those of other tests
            assert any(text in found["attach"]["found"] for text in reported)
            foreground.detach()
        attach(target.pid, AttachRequest((PluginSpec("timing"),), timeout_s=60))
        with Control.connect(target.pid) as holder:
            holder.request("lease", seconds=5)
            assert f"held by process {os.getpid()}" in doctor(target.pid, status=0)["agent"]["found"]
        detach(target.pid)
        older = Other(tmp_path / "older", "0.0.9", 7)
        keep(older, target.pid, "timing")
        assert "attach replaces it" in doctor(target.pid, status=0)["agent"]["found"]
        detach(target.pid)
        newer = Other(tmp_path / "newer", "99.0", 7)
        keep(newer, target.pid, "timing")
        found = doctor(target.pid, status=1)
        assert f"hookd detach {target.pid}" in found["agent"]["cure"]


def test_why_calls_are_not_entered_in_c(tmp_path):
    with Process(Job("puppet.py").command(), env=training.environment(HOOKD_ENTRY="0"), stdin=True) as target:
        target.expect("^ready$")
        attach(target.pid, AttachRequest((PluginSpec("timing"),), timeout_s=60))
        found = doctor(target.pid, status=0)["calls"]
        assert (found["state"], found["found"]) == (
            "note", "nn.Module.__call__ is replaced in Python: HOOKD_ENTRY=0 is in its environment",
        )  # fmt: skip
        detach(target.pid)
    build.place("entry", directory=tmp_path).touch()
    assert checks.native_code(tmp_path).found.startswith("kernel not compiled")
    build.place("kernel", directory=tmp_path).touch()
    assert checks.native_code(tmp_path).state == "ok"


def test_no_such_process():
    assert "ps" in doctor(4194303, status=1)["process 4194303"]["cure"]


def test_a_process_that_has_no_torch_or_is_no_python():
    command = [sys.executable, "-c", "import sys; print('ready', flush=True); sys.stdin.read()"]
    with Process(command, env=tool_environment(), stdin=True) as target:
        target.expect("ready")
        found = doctor(target.pid, status=1)
        assert found["torch"]["state"] == "bad"
        assert not [check for check in found.values() if "--force" in check["cure"]]
    with Process(["sleep", "100"], env=tool_environment()) as target:
        assert "not a Python process" in doctor(target.pid, status=1)["Python"]["found"]


def test_stopped_traced_and_ended(tmp_path):
    with stub.start(tmp_path, WORKING) as target:
        assert doctor(target.pid, status=0)["main thread"]["state"] == "ok"
        target.signal(signal.SIGSTOP)
        wait_until(lambda: target_checks._holds(lambda: state(target.pid) == "T", 0.1), what="it stops")
        found = doctor(target.pid, status=1)
        assert found["state"]["cure"].startswith(f"Continue it with `kill -CONT {target.pid}`")
        assert not [check for check in found.values() if "--force" in check["cure"]]
        target.signal(signal.SIGCONT)
        with Process([sys.executable, "-c", TRACER, str(target.pid)], env=tool_environment(), stdin=True) as tracer:
            tracer.expect("tracing")
            found = doctor(target.pid, status=1)["state"]
            assert f"traced by process {tracer.pid} (python" in found["found"]
            tracer.send("enough")
            tracer.finish()
        target.signal(signal.SIGKILL)
        wait_until(lambda: state(target.pid) == "Z" or target.popen.poll() is not None)
    zombie = os.fork()
    if zombie == 0:
        os._exit(0)
    try:
        wait_until(lambda: state(zombie) == "Z")
        assert "has ended" in doctor(zombie, status=1)["state"]["found"]
    finally:
        os.waitpid(zombie, 0)


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(0x4206, int(sys.argv[1]), None, None) == 0  # PTRACE_SEIZE
print("tracing", flush=True)
sys.stdin.readline()
"""


def test_disabled_blocked_and_in_another_namespace(tmp_path):
    with stub.start(tmp_path, WORKING, HOOKD_DISABLE="1") as target:
        assert doctor(target.pid, status=1)["HOOKD_DISABLE"]["state"] == "bad"
        stub.finish(target)
    with stub.start(tmp_path, "print('ready', flush=True)\nctypes.CDLL(None).pause()") as target:
        found = doctor(target.pid, status=0)["main thread"]
        assert "has not moved" in found["found"]
        assert f"--force {target.pid}" in found["cure"]
    if os.geteuid() == 0:
        with stub.start(tmp_path, UNSHARED + WORKING) as target:
            assert "another mount namespace" in doctor(target.pid, status=0)["container"]["found"]
            stub.finish(target)


UNSHARED = "assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_as_another_user_it_names_the_owner_and_what_helps(tmp_path):
    with stub.start(tmp_path, WORKING) as target:
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(target.pid)], env=tool_environment(HOME=tmp_path),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert f"sudo hookd attach {target.pid}" in done.stdout, done
        assert "belongs to user 0" in done.stdout
        stub.finish(target)


AS_NOBODY = """
import os, sys
from hookd.tool.attach import discover, target, upgrade
from hookd.tool.inject import interpreter, remote_debug
from hookd.tool.linux import owner, permission, proc
from hookd.tool.cli import ps, target_checks, targets
from hookd.tool.daemon import client
os.setgroups([]); os.setgid(65534); os.setuid(65534)  # after the imports: this Python may be out of its reach
for check in target_checks.of_target(int(sys.argv[1])):
    print(check)
"""
