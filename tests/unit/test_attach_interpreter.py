"""What is read of an interpreter from memory alone, on images made for it."""

from __future__ import annotations

import ctypes
import os
import struct

import pytest

from hookd.attach import interpreter
from hookd.attach.interpreter import DEBUG_COOKIE, RUNTIME


@pytest.mark.parametrize(
    ("version", "cookie", "flag", "is_free"),
    [
        ((3, 13), DEBUG_COOKIE, 1, True),
        ((3, 14), DEBUG_COOKIE, 1, True),
        ((3, 13), DEBUG_COOKIE, 0, False),
        ((3, 14), b"whatever", 1, False),
        ((3, 12), DEBUG_COOKIE, 1, False),
    ],
)
def test_a_free_threaded_build_is_known_by_its_debug_offsets(version, cookie, flag, is_free):
    image = ctypes.create_string_buffer(struct.pack("<8sQQ", cookie, version[0] << 24 | version[1] << 16, flag), 24)
    symbols = {RUNTIME: ctypes.addressof(image)}
    assert interpreter._is_free_threaded(os.getpid(), version, symbols) is is_free
    assert interpreter._is_free_threaded(os.getpid(), version, {}) is False
