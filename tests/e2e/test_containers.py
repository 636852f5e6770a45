"""Attach from outside to training in containers of many kinds: found, served, left as it was, nothing written."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from hookd.tool.attach import control, discover
from tests.support import interpreters, stub
from tests.support.container import ALL, Box, has_ended, init_of, interpreter_homes, own_targets, target_of
from tests.support.environment import REPOSITORY, TARGETS, bare_python
from tests.support.processes import wait_until
from tests.support.tool import Attachment, hookd_json

pytestmark = [
    pytest.mark.usefixtures("attachable"),
    pytest.mark.skipif(os.geteuid() != 0, reason="takes root to make a container"),
]

NOBODY = 65534
BOXES = {
    "namespaces": Box(),
    "chroot": Box(namespaces=(), read_only=False),
    "user namespace": Box(user=100000),
    "nothing writable, user namespace": Box(writable=(), user=100000),
    "time namespace": Box(namespaces=(*ALL, "time")),
    "nobody, hidepid, a home of its own": Box(uid=NOBODY, proc_options="hidepid=2"),
    "nobody, writes to /dev/shm alone": Box(uid=NOBODY, writable=("/dev/shm",)),
    "no /proc": Box(proc=False),
}
ALIKE = (
    "namespaces",
    "chroot",
    "nothing writable, user namespace",
    "time namespace",
    "nobody, writes to /dev/shm alone",
)
"""What is odd about these, others of them have in part: `make long` makes them."""
PLACES = ("tmp", "var/tmp", "run", "dev/shm", "root", "home/user")
ROOTS = [path for path in os.environ.get("HOOKD_COMPAT_ROOTS", "").split(os.pathsep) if path]
WORKING = "until_stopped(lambda: time.sleep(0.001))"


def files(pid: int) -> set[str]:
    """Return what lies where a program may write, and in its current directory, as it sees them."""
    root = Path(f"/proc/{pid}/root")
    found = {f"/{place}/{path.name}" for place in PLACES for path in (root / place).iterdir()}
    return found | {f"./{path.name}" for path in Path(f"/proc/{pid}/cwd").iterdir() if path.name != "__pycache__"}


def strays(pid: int) -> list[Path]:
    """Return the files of the host that have the name of an agent in that process."""
    numbers = {pid, stub.proc.status(pid).nspid}
    places = [Path("/") / place for place in PLACES if Path("/", place).is_dir()]
    found = (path for place in places for path in place.iterdir())
    return [path for path in found if (named := re.match(r"hookd-(\d+)-", path.name)) and int(named[1]) in numbers]


@pytest.mark.parametrize(
    "box", [pytest.param(box, marks=[pytest.mark.load] * (name in ALIKE), id=name) for name, box in BOXES.items()]
)
def test_training_in_a_container_is_served_and_left_as_it_was(tmp_path, box):
    with box.start_training(tmp_path) as process:
        assert_served_and_left(process, has_file=bool(box.writable))


def assert_served_and_left(process, *, has_file: bool = True) -> None:
    pid = target_of(process)
    before, complaints = files(pid), list(process.err)
    with Attachment([pid]) as attachment:
        wait_until(lambda: attachment.metrics().total("hookd_steps_total") > 3, what="steps are counted")
        called = {"name": "hookd_timing_forward_calls_total", "module": "(root)"}
        wait_until(lambda: attachment.metrics().total(**called) > 3, what="calls are")
        new = files(pid) - before
        assert len(new) == has_file, new
        assert all(re.fullmatch(r"/[\w/]+/hookd-\d+-\w+\.sock", path) for path in new)
        attachment.detach()
    assert files(pid) == before
    assert discover.find_page(pid) is None
    if not Path(f"/proc/{pid}/root").samefile("/"):
        assert strays(pid) == []
    process.send("quit")
    process.finish()
    assert process.err == complaints, "torch's own, of a missing /proc"


@pytest.mark.parametrize("root", ROOTS or [None])
def test_training_in_another_system_is_served(tmp_path, root):
    """With another Python, torch and C library: a chroot of another distribution."""
    if root is None:
        pytest.skip("HOOKD_COMPAT_ROOTS names no root directory of another system")
    with Box(root=root, python=interpreters.python_of(Path(root))).start_training(tmp_path) as process:
        assert_served_and_left(process)


@pytest.mark.parametrize("root", ROOTS or [None])
def test_a_target_that_can_write_nowhere_is_reached_through_memory(tmp_path, root):
    """CPython's own remote debugging wants a file; without one, and on older versions always, it is a stop."""
    box = Box(writable=()) if root is None else Box(writable=(), root=root, python=interpreters.python_of(Path(root)))
    with box.start_stub(tmp_path, WORKING) as process:
        assert stub.inject(target_of(process)).method == "ptrace"
        stub.finish(process)


def test_the_kill_of_a_container_is_a_lost_target_with_its_last_counters(tmp_path):
    with BOXES["namespaces"].start_training(tmp_path) as process:
        pid = target_of(process)
        with Attachment([pid]) as attachment:
            wait_until(lambda: attachment.metrics().total("hookd_steps_total") > 3)
            counted = attachment.metrics().total("hookd_steps_total")
            os.kill(init_of(process), signal.SIGKILL)
            has_ended(pid)
            wait_until(lambda: attachment.metrics().total("hookd_target_state", state="lost") == 1)
            last = attachment.metrics()
            assert last.total("hookd_target_up") == 0
            assert last.total("hookd_steps_total") >= counted
            assert last.labels("hookd_target_info", "reason") == {"signal SIGKILL"}
            reported = (
                rf"^process {pid} was killed by SIGKILL \(Killed\); its container has ended with it.*; its counters"
            )
            attachment.process.expect(reported)
            attachment.process.signal(signal.SIGINT)
            attachment.process.wait()
        assert process.wait() == 128 + signal.SIGKILL


def test_a_container_that_outlives_its_target_is_left_without_a_socket(tmp_path):
    parent = "import subprocess, sys\nsubprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL)\nsys.stdin.readline()"
    targets = own_targets(tmp_path)
    see = [targets, bare_python().parents[1], *interpreter_homes()]
    command = [bare_python(), "-c", parent, bare_python(), targets / "mlp.py", "--steps", "0", "--pause", "0.01"]
    with Box().start(tmp_path, command, see, TORCHINDUCTOR_CACHE_DIR=str(targets)) as process:
        process.expect("^step 2 ")
        pid = target_of(process)
        before = files(pid)
        with Attachment([pid]) as attachment:
            wait_until(lambda: attachment.metrics().total("hookd_steps_total") > 3)
            assert len(files(pid) - before) == 1
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: attachment.metrics().total("hookd_target_state", state="lost") == 1)
            assert wait_until(lambda: target_of(process) != pid)
            wait_until(lambda: files(target_of(process)) == before, what="the socket file is removed")
        process.send("end")
        process.finish()


def test_a_tool_in_a_container_attaches_to_its_neighbour_of_the_same_user(tmp_path):
    """Neither is root, nothing can be written, /proc shows nobody else."""
    inside = Box(uid=NOBODY, proc_options="hidepid=2", writable=())
    see = [REPOSITORY, TARGETS, bare_python().parents[1], *interpreter_homes()]
    environment = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/plugins", "TORCHINDUCTOR_CACHE_DIR": str(TARGETS)}
    command = [sys.executable, "-c", NEIGHBOURS, bare_python(), TARGETS / "puppet.py"]
    with inside.start(tmp_path, command, see, **environment) as process:
        assert process.finish() == ["ptrace", "identity", "running", "PermissionDenied hidden", "ok"], (
            process.describe()
        )


NEIGHBOURS = """
import os, subprocess, sys
from hookd.tool.attach import AttachRequest, Control, attach, detach
from hookd.errors import HookdError
environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
target = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
assert target.stdout.readline() == "ready\\n"
result = attach(target.pid, AttachRequest(plugins=(), timeout_s=60))
print(result.method)
print("identity" if result.identity["control"].startswith("@") else result.identity)
with Control.connect(target.pid) as control:
    print(control.request("status")["state"])
detach(target.pid)
try:
    attach(1, AttachRequest(plugins=()))
except HookdError as error:
    print(type(error).__name__, error.reason)
target.communicate("quit\\n", timeout=60)
print("ok" if target.returncode == 0 else target.returncode)
"""


@pytest.mark.load
def test_doctor_and_detach_reach_into_a_container(tmp_path):
    with BOXES["nothing writable, user namespace"].start_training(tmp_path) as process:
        pid = target_of(process)
        with Attachment([pid], "--keep") as attachment:
            attachment.process.signal(signal.SIGINT)
            attachment.process.wait()
        found = {check["name"]: check["found"] for check in hookd_json("doctor", str(pid))["checks"]}
        assert "already attached" in found["agent"]
        assert control.detach(pid)["restored"] == "identity"
        process.send("quit")
        process.finish()
