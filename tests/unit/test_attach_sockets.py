"""The socket file of a killed target is removed; nothing else is, whatever a target says its path is."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from hookd.tool.attach.control import remove_dead

if TYPE_CHECKING:
    from pathlib import Path

NAME = "hookd-4711-0123456789ab.sock"


def bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return listener


def test_a_dead_socket_is_removed(tmp_path):
    path = tmp_path / NAME
    bound(path).close()
    assert remove_dead(str(path), os.getuid())
    assert not path.exists()


def test_a_socket_that_somebody_listens_on_stays(tmp_path):
    path = tmp_path / NAME
    with bound(path):
        assert not remove_dead(str(path), os.getuid())
        assert path.exists()


def test_of_another_user_it_stays(tmp_path):
    path = tmp_path / NAME
    bound(path).close()
    assert not remove_dead(str(path), os.getuid() + 1)
    assert path.exists()


@pytest.mark.parametrize("name", [NAME, "passwd", "hookd-1-0123456789ab.sock.bak"])
def test_what_is_no_socket_of_ours_stays(tmp_path, name):
    path = tmp_path / name
    path.write_text("precious")
    assert not remove_dead(str(path), os.getuid())
    assert not remove_dead(f"{tmp_path}/x/../{name}", os.getuid())
    assert path.read_text() == "precious"


def test_a_pair_or_an_empty_path_is_no_file():
    assert not remove_dead("@7:4711", os.getuid())
    assert not remove_dead("", os.getuid())
