"""Only `hookd.tool.linux.untrusted` opens paths that a target controls, and it checks them before it opens them."""

from __future__ import annotations

import ast
import os
import re
import socket
import stat
from pathlib import Path

import pytest

import hookd
from hookd.tool.linux import untrusted
from hookd.wire.page import PageWriter

ROOT = Path(hookd.__file__).parent
TOOL_SIDE = ("tool", "wire/page")
KERNEL, OURS, OPERATOR, NEW = (
    "a file that the kernel makes up, which nobody can replace",
    "a file of hookd's own, in a directory that nobody else can write to",
    "a path that the person who runs hookd has named, with their own rights",
    "a name that did not exist: O_EXCL, in a directory of open_directory",
)
OPENS = {
    "tool/attach/_site/sitecustomize.py": {"_read": OURS, "_note": OURS},  # runs in the command of `hookd run`
    "tool/linux/accounts.py": {"_ranges": OPERATOR, "uid_of": KERNEL},
    "tool/attach/command.py": {
        "_environment": KERNEL,
        "_is_text": OPERATOR,
        "_null": KERNEL,
        "_occupy_standard_streams": KERNEL,
    },
    "tool/linux/cgroups.py": {"folders": KERNEL},
    "tool/linux/headroom.py": {
        "_committed": KERNEL,
        "_reclaimable": KERNEL,
        "_threads_left": KERNEL,
        "memory_left": KERNEL,
        "_number": KERNEL,
    },
    "tool/inject/injector.py": {"harden": KERNEL},
    "tool/attach/launch.py": {"failures": OURS, "prepare": OURS, "_locked": OURS},
    "tool/linux/oom.py": {"kills": KERNEL, "killed": KERNEL},
    "tool/attach/payload.py": {"_write": OURS, "unpack_testing": OURS, "stub": OURS, "_agent_files": OURS},
    "tool/linux/bounded.py": {"connect": "by a child, on a file system that the kernel keeps"},
    "tool/linux/permission.py": {"_yama": KERNEL},
    "tool/linux/ports.py": {"owners": KERNEL},
    "tool/fingerprints/file.py": {
        "__init__": OPERATOR,
        "read": OPERATOR,
        "digests": OPERATOR,
        "_shrink": OPERATOR,
        "wait": OPERATOR,
    },
    "tool/linux/private_file.py": {"replacing": OPERATOR},  # or a file of hookd's own
    "tool/linux/proc.py": {"read": KERNEL, "size": KERNEL, "has_ended": KERNEL},
    "tool/inject/remote_debug.py": {"create": NEW, "_is_usable": NEW},
    "tool/attach/requirements.py": {"_files": OURS, "_recorded": OURS},
    "tool/attach/sources.py": {"_module_files": OURS},
    "tool/linux/waiter.py": {"_begin": KERNEL, "_is_runnable": KERNEL},
    "tool/linux/waiter_child.py": {"open_name": KERNEL, "capabilities": KERNEL},
    "tool/linux/untrusted.py": {
        "open_path": "O_PATH",
        "open_file": "open_path",
        "open_directory": "O_PATH",
        "connect": "O_PATH",
    },
    "tool/check/blocking.py": {"problems": OPERATOR},
    "tool/check/types.py": {"problems": OURS},
    "tool/cli/checks.py": {"of_machine": KERNEL, "has_capability": KERNEL},
    "tool/cli/plugin_check.py": {"_script": OURS},
    "tool/cli/plugin_new.py": {"write": OPERATOR},
    "tool/cli/program.py": {
        "__init__": OURS,
        "lines": OURS,
        "answer": OURS,
        "parse": OURS,
        "watched": OURS,
        "_until": OURS,
    },
    "tool/cli/replay.py": {"answer": OURS},
    "tool/cli/root_daemon.py": {"_cmdline": KERNEL, "_listeners": KERNEL},
    "tool/cli/target_checks.py": {"_frozen": KERNEL, "_hides_processes": KERNEL},
    "tool/config/ownership.py": {"_is_unmapped": KERNEL, "open_checked": OPERATOR},
    "tool/config/projected.py": {"_is_mounted_so": KERNEL},
    "tool/config/webhooks.py": {"_read_secret_file": OPERATOR},
    "tool/inject/queued_source.py": {"_template": OURS},
    "tool/daemon/api.py": {"_remove_if_refused": OURS},
    "tool/daemon/client.py": {"connect": "the control socket: its peer has to be the same user or root"},
    "tool/daemon/incidents/database.py": {"open_to_write": OURS, "_make_private": OURS, "_reader": OURS},
    "tool/daemon/incidents/store.py": {"boot_id": KERNEL},
    "tool/daemon/web/host_names.py": {"_own_names": "resolv.conf, which is root's"},
    "tool/daemon/web/pages/assets.py": {"content": OURS},
    "tool/daemon/fleet/fd_budget.py": {"_has_opened": KERNEL},
    "tool/daemon/fleet/last_session.py": {"_read": OURS},
}
"""The functions of the tool side that open a file by name, and the owner of that name: never a target."""
_OPENING = re.compile(r"(^|\.)(open|read_bytes|read_text|write_bytes|write_text|copy|copy2|copyfile|copytree|connect)$")
_NO_PATH = re.compile(
    r"^((untrusted|bounded)\.connect|Control\.connect|control\.Control\.connect|IncidentStore\.open|port\.open|build_opener\(.*"
    r"|read_text|copy)$"  # of hookd.tool.config.tables; a parameter of the page's reader
)
_NAMES_MORE = re.compile(r"/proc/.*/(root|fd|cwd|exe|map_files)\b")
NAMES = {
    "tool/linux/bounded.py": {"connect": "by a child"},
    "tool/attach/control.py": {"path": "for a person to read"},
    "tool/attach/discover.py": {"numbers_of_pages": "lists the numbers, and their links are read"},
    "tool/linux/headroom.py": {"_descriptors": "counts the numbers"},
    "tool/inject/remote_debug.py": {"remove_stale": "lists a directory of open_directory"},
    "tool/linux/untrusted.py": {"open_file": "open_path", "open_memory_file": "opened by open_file", "open_directory": "O_PATH",
                            "connect": "O_PATH"},
    "tool/linux/waiter_child.py": {"read_part": "opened by open_file"},
    "tool/config/ownership.py": {"open_checked": "opens its own descriptor", "_require_opened": "the list of the opened file"},
    "tool/daemon/fleet/usage.py": {"_fds": "counts the numbers"},
}  # fmt: skip
"""The functions that build a path below a process's descriptors, root or program, and for which purpose."""


def functions():
    for package in TOOL_SIDE:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield str(file.relative_to(ROOT)), node


def found(is_one):
    table = {}
    for file, function in functions():
        if any(map(is_one, ast.walk(function))):
            table.setdefault(file, set()).add(function.name)
    return table


def opens(node):
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    return _OPENING.search(name) is not None and _NO_PATH.match(name) is None


def names_more(node):
    return isinstance(node, ast.JoinedStr) and _NAMES_MORE.search(ast.unparse(node)) is not None


@pytest.mark.parametrize(("is_one", "known"), [(opens, OPENS), (names_more, NAMES)])
def test_nothing_of_a_targets_is_opened_elsewhere(is_one, known):
    assert found(is_one) == {file: set(reasons) for file, reasons in known.items()}


@pytest.mark.parametrize(
    ("text", "is_seen"),
    [
        ("os.open(f'/proc/{pid}/fd/3', 0)", True),
        ("open(x)", True),
        ("path.read_bytes()", True),
        ("sock.connect(path)", True),
        ("shutil.copyfile(a, b)", True),
        ("untrusted.open_file(path, accept)", False),
        ("untrusted.connect(sock, name, dir_fd=3, uid=0)", False),
    ],
)
def test_the_search_sees_an_open(text, is_seen):
    assert any(map(opens, ast.walk(ast.parse(text)))) is is_seen


def test_a_pipe_is_neither_opened_nor_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(untrusted.UnexpectedError):
        untrusted.open_file(tmp_path / "pipe", lambda _: True)
    with pytest.raises(OSError, match="No such device"):  # nobody has it open for reading
        os.open(tmp_path / "pipe", os.O_WRONLY | os.O_NONBLOCK)


def test_a_file_that_is_not_accepted_and_a_link_are_not_opened(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(untrusted.UnexpectedError):
        untrusted.open_file(tmp_path / "file", lambda _: False)
    with pytest.raises(untrusted.UnexpectedError):
        untrusted.open_file(tmp_path / "link", lambda _: True)
    fd = untrusted.open_file(tmp_path / "link", lambda status: stat.S_ISREG(status.st_mode), follow=True)
    try:
        assert os.read(fd, 9) == b"x"
    finally:
        os.close(fd)


def test_the_file_that_was_looked_at_is_opened_whatever_its_name_leads_to_then(tmp_path):
    (tmp_path / "name").write_text("looked at")
    (tmp_path / "other").write_text("other")

    def exchange(_):
        (tmp_path / "other").rename(tmp_path / "name")
        return True

    fd = untrusted.open_file(tmp_path / "name", exchange)
    try:
        assert os.read(fd, 9) == b"looked at"
    finally:
        os.close(fd)


def test_a_page_is_opened_and_a_file_on_a_tmpfs_or_of_another_user_is_not(tmp_path):
    mine = frozenset({os.getuid()})
    page = PageWriter.create({"pid": os.getpid()})
    try:
        os.close(untrusted.open_memory_file(os.getpid(), page.fd, mine))
        with pytest.raises(untrusted.UnexpectedError):
            untrusted.open_memory_file(os.getpid(), page.fd, frozenset({os.getuid() + 1}))
    finally:
        page.close()
    with Path("/dev/shm", f"test-{os.getpid()}").open("w+") as file:
        Path(file.name).unlink()
        with pytest.raises(untrusted.UnexpectedError):
            untrusted.open_memory_file(os.getpid(), file.fileno(), mine)


def test_no_descriptor_stays_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    test_a_file_that_is_not_accepted_and_a_link_are_not_opened(tmp_path)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("kind", ["link", "file"])
def test_only_a_socket_is_connected_to(tmp_path, kind):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as ours:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        (tmp_path / "link").symlink_to(tmp_path / "socket")
        (tmp_path / "file").touch()
        directory = os.open(tmp_path, os.O_PATH)
        try:
            with pytest.raises(untrusted.UnexpectedError):
                untrusted.connect(ours, kind, dir_fd=directory, uid=os.getuid())
            with pytest.raises(untrusted.UnexpectedError, match="belongs to user"):
                untrusted.connect(ours, "socket", dir_fd=directory, uid=os.getuid() + 1)
            untrusted.connect(ours, "socket", dir_fd=directory, uid=os.getuid())
        finally:
            os.close(directory)
