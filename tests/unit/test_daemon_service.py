"""The daemon's life: what it waits for before it closes everything."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
import tempfile
import threading

import pytest

from hookd.errors import PermissionDenied
from hookd.tool.config import load
from hookd.tool.daemon import service
from hookd.tool.daemon.incidents.store import IncidentStore
from hookd.tool.daemon.service import Service
from tests.support.processes import PATIENCE_S, Process


class Slow:
    """A watcher whose look is under way while the daemon ends."""

    families = ()

    def __init__(self):
        self.service = None
        self.began, self.may_go_on = threading.Event(), threading.Event()
        self.was_closed = None

    def poll(self, targets):
        self.began.set()
        self.may_go_on.wait(600)
        self.was_closed = self.service.fleet._is_closed

    def samples(self, target):
        return ()


def test_a_look_that_is_under_way_is_waited_for_before_targets_and_store_are_closed(tmp_path):
    config = load({"listen": "127.0.0.1:0", "control": tmp_path / "sock", "state_dir": tmp_path, "poll_s": 0.05}, {})
    slow = Slow()

    async def live():
        async with Service(config, only=frozenset()) as running:
            slow.service, running._watchers = running, (slow,)
            assert await asyncio.to_thread(slow.began.wait, PATIENCE_S)
            threading.Timer(0.2, slow.may_go_on.set).start()

    asyncio.run(asyncio.wait_for(live(), PATIENCE_S))
    assert slow.was_closed is False


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errno.EADDRINUSE, "address-in-use"), (errno.EACCES, "address-not-allowed"),
        (errno.EADDRNOTAVAIL, "no-such-address"), (socket.EAI_NONAME, "no-such-address"),
    ],
)  # fmt: skip
def test_the_reason_says_why_it_cannot_listen(error, reason):
    refusal = service._cannot_listen("127.0.0.1:80", OSError(error, "text"))
    assert (refusal.reason, isinstance(refusal, PermissionDenied)) == (reason, error == errno.EACCES)


def test_incidents_are_their_owners_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        tmp_path.chmod(0o755)
        store = IncidentStore.open(tmp_path)
        store.add((1, 2, 3), "run", "0", [{"seq": 1, "kind": "nan", "message": "m"}])
        assert store.query()
        files = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        store.close()
    finally:
        os.umask(before)
    assert set(files.values()) == {0o600}, files
    assert "incidents.sqlite" in files


def test_where_others_may_write_nothing_is_stored_and_a_link_of_theirs_leads_nowhere(tmp_path, caplog):
    state, precious = tmp_path / "state", tmp_path / "precious"
    state.mkdir()
    state.chmod(0o1777)
    (state / "incidents.sqlite").symlink_to(precious)
    store = IncidentStore.open(state)
    store.add((1, 2, 3), "run", "0", [{"seq": 1, "kind": "nan", "message": "m"}])
    assert len(store.query()) == 1, "it is in memory"
    store.close()
    assert not precious.exists()
    assert "others may write to the directory" in caplog.text


IMPOSTOR = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
os.setuid(65534)  # SO_PEERCRED names who has called listen(2)
listener.listen()
print("ready", flush=True)
sys.stdin.read()
"""
CLIENT = """
import os, pathlib, sys
from hookd.tool.daemon.client import DaemonClient
from hookd.errors import PermissionDenied
os.setuid(65533)
try:
    DaemonClient(pathlib.Path(sys.argv[1])).version()
except PermissionDenied as error:
    print(error.reason)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_daemon_of_another_user_is_not_asked(stack):
    directory = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
    os.chmod(directory, 0o777)
    command = [sys.executable, "-c", IMPOSTOR, f"{directory}/sock"]
    impostor = stack.enter_context(Process(command, env=dict(os.environ), stdin=True))
    impostor.expect("ready")
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, f"{directory}/sock"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "impostor\n", done.stderr
