"""A target's agent may be anybody's program: its answers, however slow, harm only its own request."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading

import pytest

from hookd.errors import ControlError
from hookd.tool.attach.change import _boundary
from hookd.tool.attach.control import Control, _open
from hookd.tool.inject import mailbox


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.5)
        yield Control(ours, 4711), theirs


def drip(theirs, stop):
    with contextlib.suppress(OSError):
        while not stop.wait(0.05):
            theirs.send(b" ")


def test_an_answer_that_comes_a_byte_at_a_time_is_not_waited_for(pair):
    control, theirs = pair
    stop = threading.Event()
    thread = threading.Thread(target=drip, args=(theirs, stop))
    thread.start()
    try:
        with pytest.raises(ControlError, match="does not answer"):
            control.request("status")
        control.wait_closed()
    finally:
        stop.set()
        thread.join()


def test_of_a_stopped_process_it_is_said_why_it_does_not_answer(pair):
    control, _ = pair
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            control.pid = process.pid
            with pytest.raises(ControlError, match="does not answer") as raised:
                control.request("detach")
            assert f"kill -CONT {process.pid}" in raised.value.hint
        finally:
            process.kill()


@pytest.mark.parametrize(
    "answer",
    [b"[" * 100_000 + b"\n", b"{" * 3 + b"\n", b"[]\n", b"1" * 9000 + b"\n", b"\xff\n", b'"ok"\n', b"NaN\n", b"null\n"],
)
def test_an_answer_that_is_none_is_an_error_of_the_protocol(pair, answer):
    control, theirs = pair
    theirs.settimeout(5)
    threading.Thread(target=theirs.sendall, args=(answer,)).start()
    with pytest.raises(ControlError) as caught:
        control.request("status")
    assert caught.value.reason == "protocol"


def test_a_refusal_of_any_shape_is_a_refusal(pair):
    control, theirs = pair
    theirs.sendall(b'{"ok": false, "kind": ["x"], "reason": {}, "error": null, "hint": 7}\n')
    with pytest.raises(ControlError):
        control.request("status")


@pytest.mark.parametrize(
    "status",
    ['"plugins": 7', '"plugins": [7]', '"plugins": [{}]', '"plugins": [{"name": "x", "options": [1]}]', '"holders": 1'],
)
def test_plugins_and_holders_of_another_form_are_an_error_of_the_protocol(pair, status):
    control, theirs = pair
    theirs.sendall(b'{"ok": true, %s}\n' % status.encode())
    with pytest.raises(ControlError) as caught:
        control.status()
    assert caught.value.reason == "protocol"


@pytest.mark.parametrize("status", ['"marks": 7', '"marks": [{}]', '"marks": [1, 2], "span_s": "x"'])
def test_marks_of_another_form_are_an_error_of_the_protocol(pair, status):
    control, theirs = pair
    theirs.sendall(b'{"ok": true, %s}\n' % status.encode())
    with pytest.raises(ControlError) as caught:
        _boundary({0: control}, margin_s=1.0, deadline=0.0)
    assert caught.value.reason == "protocol"


def test_answers_come_in_order_and_an_end_is_one(pair):
    control, theirs = pair
    theirs.sendall(b'{"ok": true, "n": 1}\n{"ok": true, "n": 2}\n{"ok"')
    assert [control.request("status")["n"] for _ in range(2)] == [1, 2]
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(ControlError, match="has closed"):
        control.request("status")


@pytest.mark.parametrize("text", [b"[" * 60_000, b"[]", b"no JSON", b"\xff"])
def test_what_stands_in_a_mailbox_in_place_of_an_answer_is_a_value_error(text):
    fd = os.memfd_create("box")
    box = mailbox.FileBox(fd)
    try:
        box.write(mailbox.DATA, text)
        mailbox.set_word(box, mailbox.ANSWERED, len(text))
        with pytest.raises(ValueError):
            mailbox.answer(box)
        mailbox.set_word(box, mailbox.ANSWERED, 1 << 60)
        with pytest.raises(ValueError, match="too long"):
            mailbox.answer(box)
    finally:
        box.close()


def test_a_socket_of_the_target_that_is_full_and_blocks_is_not_waited_at():
    inner, outer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with inner, outer:
        with contextlib.suppress(BlockingIOError):
            while True:
                outer.send(b"x", socket.MSG_DONTWAIT)
        path = f"@{outer.fileno()}:{os.fstat(outer.fileno()).st_ino}"
        done = []
        thread = threading.Thread(target=lambda: done.append(reason_of(path)), daemon=True)
        thread.start()
        thread.join(60)
        assert done == ["gone"]


def reason_of(path):
    with pytest.raises(ControlError) as caught:
        _open(os.getpid(), path, 0.5)
    return caught.value.reason


@pytest.mark.parametrize(
    "path", ["@", "@:", "@x:1", "@0:1", "@-1:1", "@" + "9" * 40 + ":1", "@1", "", "x", "/", "/\0", "/../x"]
)
def test_a_page_that_names_no_socket_is_an_error(path):
    assert reason_of(path) == "gone"


def descriptors_of(path):
    found = []
    for link in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile by another test's thread
            if os.readlink(link.path) == str(path):
                found.append(int(link.name))
    return found


def test_a_file_that_is_named_as_a_socket_is_let_go_of(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        assert reason_of(f"@{file.fileno()}:{os.fstat(file.fileno()).st_ino}") == "gone"
        assert descriptors_of(tmp_path / "file") == [file.fileno()]
