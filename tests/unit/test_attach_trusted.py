"""Code that may be carried into a target, and the harm that a target's or a stranger's files can do to a tool run by root."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from hookd.errors import PluginError
from hookd.tool.attach import payload, sources, trusted
from hookd.tool.config import PluginSpec
from hookd.tool.inject.remote_debug import ScriptFolder, remove_stale
from hookd.tool.linux import bounded, proc
from hookd.tool.linux.untrusted import UnexpectedError
from tests.support import acl, emulated
from tests.support.processes import Process, wait_until

PLUGIN = "from hookd import Plugin\n\nclass Mine(Plugin):\n    name = 'mine'\n"
STRANGER, TARGET = 54321, 54322
OURS = trusted.of_target(os.geteuid())
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@pytest.fixture
def directory(tmp_path):
    made = tmp_path / "plugins"
    made.mkdir(mode=0o755)
    (made / "mine.py").write_text(PLUGIN)
    return made


def found(directory, trust=OURS):
    return sources.find("mine", (directory,), trust).files


def refused(directory, *words, trust=OURS):
    """Check that the plugin is refused, with these words."""
    with pytest.raises(PluginError) as caught:
        found(directory, trust)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_directory_of_ours_is_taken(directory):
    assert found(directory) == {"mine.py": PLUGIN.encode()}


def test_a_payload_is_built_of_trusted_files_alone(directory):
    directory.chmod(0o777)
    with pytest.raises(PluginError, match="others may write"):
        payload.build([PluginSpec("mine")], (directory,), OURS)


@pytest.mark.parametrize("mode", [0o757, 0o777, 0o1777])
def test_a_directory_that_others_can_write_is_refused(directory, mode):
    directory.chmod(mode)
    refused(directory, "others may write", str(directory))


@needs_root
def test_a_directory_that_another_group_can_write_is_refused_by_root(directory):
    directory.chmod(0o775)
    assert found(directory)
    os.chown(directory, 0, STRANGER)
    directory.chmod(0o775)
    refused(directory, "others may write")


@needs_root
def test_a_directory_of_another_user_is_refused_unless_it_is_the_targets(directory):
    os.chown(directory, TARGET, TARGET)
    os.chown(directory / "mine.py", TARGET, TARGET)
    refused(directory, f"belongs to user {TARGET}")
    assert found(directory, trusted.of_target(TARGET))
    refused(directory, f"belongs to user {TARGET}", trust=trusted.of_target(STRANGER))


@needs_root
def test_a_file_of_another_user_in_our_directory_is_refused(directory):
    os.chown(directory / "mine.py", STRANGER, STRANGER)
    refused(directory, f"belongs to user {STRANGER}")


def test_a_file_that_others_can_write_is_refused(directory):
    (directory / "mine.py").chmod(0o666)
    refused(directory, "others may write", "mine.py")


@needs_root
@pytest.mark.parametrize("name", [".", "mine.py"])
def test_an_access_control_list_by_which_another_user_writes_is_refused_by_root(directory, name):
    path = directory / name
    acl.grant(path, STRANGER, 5)
    assert found(directory)
    acl.grant(path, STRANGER, 7)
    refused(directory, f"others may write to {path} through an access control list")
    for uid in (TARGET, STRANGER):
        refused(directory, "access control list", trust=trusted.of_target(uid))


@needs_root
@pytest.mark.parametrize("is_package", [False, True])
def test_a_link_of_the_targets_user_to_a_file_of_roots_is_not_read(directory, tmp_path, is_package):
    secret = tmp_path / "secret.py"
    secret.write_text(PLUGIN)
    secret.chmod(0o600)
    if is_package:
        (directory / "mine.py").unlink()
        (directory / "package").mkdir(mode=0o755)
        (directory / "package" / "__init__.py").write_text(PLUGIN)
        (directory / "package" / "secret.py").symlink_to(secret)
        theirs = [directory / "package", directory / "package" / "__init__.py"]
    else:
        (directory / "mine.py").unlink()
        (directory / "mine.py").symlink_to(secret)
        theirs = []
    for path in (directory, *theirs):
        os.chown(path, TARGET, TARGET)
    refused(directory, "belongs to user 0", trust=trusted.of_target(TARGET))


def test_a_part_of_a_package_that_others_can_write_is_refused(directory):
    (directory / "mine.py").unlink()
    inner = directory / "package" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, directory / "package"):
        (folder / "__init__.py").write_text(PLUGIN if folder.name == "package" else "")
        folder.chmod(0o755)
    assert len(found(directory)) == 2
    inner.chmod(0o777)
    refused(directory, "others may write", str(inner))


def test_a_pipe_a_device_and_a_huge_file_are_passed_over_and_hold_up_nothing(directory):
    os.mkfifo(directory / "a_pipe.py")
    (directory / "b_zero.py").symlink_to("/dev/zero")
    with (directory / "c_huge.py").open("wb") as file:
        file.truncate(1 << 40)
    (directory / "d_deep.py").write_text("(" * 100_000)
    assert found(directory)
    broken = [one for one in sources.in_directory(directory, OURS) if isinstance(one, PluginError)]
    assert len(broken) == 4


# ---- the target's own files


SLEEPS = "import os, sys, time; os.chroot(sys.argv[1]); print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def jail(stack, tmp_path):
    """Start a process whose root is a directory that a stranger has prepared."""
    root = tmp_path / "root"
    for name in ("dev", "tmp", "var/tmp", "run/user/0"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o777)  # not sticky: anybody may replace our file
    (root / "var/tmp").chmod(0o1777)
    (root / "outside").mkdir()
    process = stack.enter_context(Process([sys.executable, "-c", SLEEPS, root], env=dict(os.environ)))
    process.expect("ready")
    return root, proc.status(process.pid)


@needs_root
def test_a_link_in_the_targets_root_leads_a_tool_nowhere(jail, tmp_path):
    root, status = jail
    (root / "dev/shm").symlink_to(tmp_path)
    folder = ScriptFolder(status)
    try:
        os.close(folder.create(".py"))
        assert folder.path(".py").startswith("/var/tmp/")
        (made,) = (root / "var/tmp").iterdir()
        assert (made.stat().st_mode & 0o777, made.is_file()) == (0o600, True)
        assert not list(tmp_path.glob("hookd-*"))
        assert not list((root / "tmp").iterdir())
    finally:
        folder.remove()
    assert not list((root / "var/tmp").iterdir())


def test_a_file_is_put_only_where_the_kernel_itself_keeps_it(tmp_path):
    """On a file system of a network, or of the target's own user, each call may wait for ever."""
    local = tuple(tmp_path.parts[1:])
    os.close(bounded.open_local_directory(os.getpid(), local))
    with pytest.raises(UnexpectedError, match="0x9fa0 may wait for its server"):  # proc
        bounded.open_local_directory(os.getpid(), ("proc", str(os.getpid()), "task"))


@needs_root
def test_what_is_planted_under_the_name_of_a_file_of_ours_is_neither_opened_nor_removed(jail, tmp_path):
    root, status = jail
    precious = tmp_path / "precious"
    precious.write_text("precious")
    planted = root / "var/tmp"
    name = "hookd-0123456789abcde"
    os.mkfifo(planted / f"{name}0.box")
    (planted / f"{name}1.py").symlink_to(precious)
    (planted / f"{name}2.py").mkdir()
    (planted / f"{name}3.py").write_text("a stranger's")
    os.chown(planted / f"{name}3.py", STRANGER, STRANGER)
    old = time.time() - 3600
    for path in planted.iterdir():
        os.utime(path, (old, old), follow_symlinks=False)
    (planted / f"{name}4.py").write_text("a killed tool's")
    os.utime(planted / f"{name}4.py", (old, old))
    assert remove_stale(status) == [f"/var/tmp/{name}4.py"]
    assert len(list(planted.iterdir())) == 4
    assert precious.read_text() == "precious"


@emulated.lacks("environ")
def test_of_an_environment_without_end_a_part_is_read(stack):
    code = (
        "import resource, os\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 28, -1))\n"
        "os.execve('/bin/sleep', ['sleep', '600'], {f'A{n}': 'a' * 100_000 for n in range(40)})"
    )
    process = stack.enter_context(subprocess.Popen([sys.executable, "-c", code]))
    stack.callback(process.kill)
    wait_until(lambda: len(proc.read(process.pid, "environ")) > 3_900_000, what="the other program")
    assert 1_500_000 < sum(map(len, proc.words(process.pid, "environ"))) <= proc.MAX_WORDS
