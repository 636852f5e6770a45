"""The daemon's log: it goes where somebody reads, and holds nothing up where nobody does."""

from __future__ import annotations

import contextlib
import logging
import os
import threading

import pytest

from hookd.tool.daemon.log import MAX_WAITING, Plain, Waiting
from tests.support.processes import PATIENCE_S


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    os.close(read)
    for thread in [thread for thread in threading.enumerate() if thread.name == "hookd-log"]:
        thread.join(PATIENCE_S)  # it would write to whatever gets the number of `write` next
        assert not thread.is_alive()
    os.close(write)


def record(text):
    return logging.LogRecord("hookd", logging.INFO, "", 0, text, (), None)


def test_lines_come_in_order_and_all_before_the_end(pipe, monkeypatch):
    monkeypatch.setattr("hookd.tool.daemon.log.END_S", PATIENCE_S)
    read, write = pipe
    handler = Waiting(write)
    for n in range(100):
        handler.handle(record(f"line {n}"))
    handler.close()
    assert os.read(read, 1 << 16).decode().splitlines() == [f"line {n}" for n in range(100)]


def test_a_pipe_that_nobody_reads_holds_up_nobody_and_what_was_lost_is_counted(pipe):
    read, write = pipe
    handler = Waiting(write)
    for _ in range(MAX_WAITING + 500):
        handler.handle(record("x" * 1000))
    os.set_blocking(read, False)
    lines = []
    while "are lost" not in "".join(lines):
        with contextlib.suppress(BlockingIOError):
            lines.append(os.read(read, 1 << 16).decode())
    lost = int("".join(lines).partition(" lines of this log are lost")[0].rpartition("hookd: ")[2])
    assert 0 < lost <= 500
    handler.close()


def test_the_end_does_not_wait_for_a_reader_that_never_comes(pipe, monkeypatch):
    monkeypatch.setattr("hookd.tool.daemon.log.END_S", 0.1)
    handler = Waiting(pipe[1])
    for _ in range(MAX_WAITING + 500):
        handler.handle(record("x" * 1000))
    handler.close()
    handler._lines.get()
    handler._lines.put(None)


def test_a_full_disk_costs_lines_and_nothing_else():
    fd = os.open("/dev/full", os.O_WRONLY)
    handler = Waiting(fd)
    handler.handle(record("nobody will read this"))
    handler.close()
    os.close(fd)


def test_what_a_target_says_is_one_line_that_no_terminal_obeys():
    reported = record("run %s")
    reported.args = ("\x1b[2Jx\nhookd WARNING: lost",)
    try:
        raise ValueError("\x9b31m")
    except ValueError as error:
        reported.exc_info = (type(error), error, error.__traceback__)
    first, *traceback = Plain("hookd %(message)s").format(reported).split("\n")
    assert first == "hookd run  [2Jx hookd WARNING: lost"
    assert traceback[0].startswith("Traceback")
    assert traceback[-1] == "ValueError:  31m"
