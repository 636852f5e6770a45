"""The place where a tool reaches an agent: a socket file in a usual place, or a pair of sockets if there is none."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from hookd.errors import AttachError, ControlError
from hookd.target.remote import endpoint
from hookd.tool.attach import control

GREETING = b"hello\n"


@pytest.fixture
def short():
    """A directory whose name leaves room in a socket's address, as `tmp_path` may not."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def nowhere(monkeypatch):
    """No directory can be written."""

    def refuse(path: str) -> endpoint.SocketFile:
        raise PermissionError(13, path)

    monkeypatch.setattr(endpoint, "SocketFile", refuse)


def accepted(opened: endpoint.Endpoint) -> socket.socket:
    opened.socket.setblocking(True)
    sock = opened.accept()
    assert sock is not None
    return sock


def assert_speaks(opened: endpoint.Endpoint) -> None:
    ours = control._open(os.getpid(), opened.path, 5.0)
    theirs = accepted(opened)
    with ours, contextlib.closing(theirs):
        ours.sendall(GREETING)
        assert theirs.recv(100) == GREETING


def test_a_directory_whose_name_is_no_text_is_passed_over(short, monkeypatch):
    """Its name would come out of the page as another one, and nobody could send the agent away."""
    odd = os.fsencode(short) + b"/bad\xff"
    os.mkdir(odd)
    monkeypatch.setitem(os.environb, b"XDG_RUNTIME_DIR", odd)
    opened = endpoint.open_endpoint()
    assert opened.path.encode()
    assert_speaks(opened)
    opened.close()
    opened.unlink()


def test_a_file_for_its_owner_alone_that_goes_on_request(short, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    opened = endpoint.open_endpoint()
    path = Path(opened.path)
    assert path.parent == short
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert_speaks(opened)
    opened.close()
    assert path.exists(), "a forked child closes and leaves the file to its parent"
    opened.unlink()
    assert not path.exists()


def test_a_directory_behind_a_link_is_named_without_it(short, monkeypatch):
    """A tool with another root directory would follow the link into its own."""
    (short / "real").mkdir()
    (short / "link").symlink_to(short / "real")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short / "link"))
    opened = endpoint.open_endpoint()
    assert Path(opened.path).parent == short / "real"
    assert_speaks(opened)
    opened.close()
    opened.unlink()


def test_a_tool_follows_no_link_of_the_target(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ControlError) as caught:
        control._open(os.getpid(), f"{tmp_path}/link/hookd-1-0123456789ab.sock", 1.0)
    assert caught.value.reason == "gone"


def test_a_path_that_no_socket_can_have_is_passed_over(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    opened = endpoint.open_endpoint()
    assert not list(long.iterdir())
    assert len(opened.path) < 108
    opened.close()
    opened.unlink()


@pytest.mark.usefixtures("nowhere")
def test_a_pair_where_nothing_can_be_written(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    opened = endpoint.open_endpoint()
    assert opened.path.startswith("@")
    for _ in range(3):
        assert_speaks(opened)
    assert tempfile.tempdir is None, "the training's own choice of a directory is not made for it"
    opened.close()


@pytest.mark.usefixtures("nowhere")
def test_a_number_that_is_another_file_by_now_is_not_spoken_to():
    opened = endpoint.open_endpoint()
    number, _, inode = opened.path[1:].partition(":")
    for path in (f"@{number}:{int(inode) + 1}", "@9999:1", "@x:y", "@"):
        with pytest.raises(ControlError) as caught:
            control._open(os.getpid(), path, 1.0)
        assert caught.value.reason == "gone"
    opened.close()


@pytest.mark.usefixtures("nowhere")
def test_what_is_no_connection_is_passed_over():
    opened = endpoint.open_endpoint()
    outer = opened._outer
    with open(os.devnull) as file:
        socket.send_fds(outer, [b"x"], [file.fileno()])
        outer.send(b"nothing")
        assert opened.accept() is None
        assert opened.accept() is None
        assert opened.accept() is None, "and nothing waits"
    opened.close()


@pytest.mark.usefixtures("nowhere")
def test_no_socket_at_all_is_refused_by_name(monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("_socket.socketpair", refuse)
    with pytest.raises(AttachError) as caught:
        endpoint.open_endpoint()
    assert caught.value.reason == "no-socket"
