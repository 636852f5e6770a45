"""Checks of an interpreter and of torch before an attach, on tables made for it and with parts removed."""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from types import SimpleNamespace

import pytest
import torch

from hookd.errors import TargetUnsupported
from hookd.target.boot import bootstrap
from hookd.target.boot import foundation as of_torch
from hookd.tool.inject import debug_table, foundation, remote_debug
from hookd.tool.inject.interpreter import DEBUG_COOKIE, RUNTIME, Interpreter
from hookd.wire import tested_versions
from tests.support.stub import own_memory

SIZE = 4096
FINAL, BETA = 0xF0, 0xB0
NEWER = (3, tested_versions.NEWEST_PYTHON[1] + 1)


class MadeUp:
    """A runtime, its main interpreter and its main thread in our own memory, with a table like `layout`'s.

    Args:
        version: the version of the interpreter, and of its table unless `says` is given.
        changed: fields of the table with other values than usual.
    """

    def __init__(self, version, layout=debug_table.NEWEST, says=None, level=FINAL, **changed):
        self.parts = [ctypes.create_string_buffer(SIZE) for _ in range(3)]
        runtime, self.interpreter, self.thread = map(ctypes.addressof, self.parts)
        names = [f"{group}.{field}" for group, fields in debug_table._LAYOUTS[layout] for field in fields.split()]
        at = dict.fromkeys(names, 0)
        at |= {f"{group}.size": SIZE for group in ("runtime_state", "interpreter_state", "thread_state")}
        at |= {
            "runtime_state.finalizing": 48 + 8 * len(names),
            "runtime_state.interpreters_head": 2048,
            "interpreter_state.id": 8,
            "interpreter_state.next": 16,
            "interpreter_state.threads_main": 24,
            "debugger_support.remote_debugging_enabled": 64,
            "thread_state.interp": 8,
            "debugger_support.eval_breaker": 16,
            "debugger_support.remote_debugger_support": 128,
            "debugger_support.debugger_script_path": 4,
            "debugger_support.debugger_script_path_size": 512,
        }
        at |= {name.replace("__", "."): value for name, value in changed.items()}
        major, minor = says or version
        table = struct.pack("<8sQQ", DEBUG_COOKIE, major << 24 | minor << 16 | level, 0)
        self.put(runtime, table + struct.pack(f"<{len(names)}Q", *at.values()))
        self.put(runtime + 2048, struct.pack("<Q", self.interpreter))
        self.put(self.interpreter + 24, struct.pack("<Q", self.thread))
        self.put(self.interpreter + 64, struct.pack("<i", 1))
        self.put(self.thread + 8, struct.pack("<Q", self.interpreter))
        self.python = Interpreter(version, "/usr/bin/python", {RUNTIME: runtime}, (0, 0))

    @staticmethod
    def put(address, data):
        ctypes.memmove(address, data, len(data))

    def require(self, *, is_forced=False):
        foundation.require(own_memory(), self.python, is_forced=is_forced)


def refused(one):
    with pytest.raises(TargetUnsupported) as caught:
        one.require()
    assert caught.value.reason == "python-version"
    return caught.value.message


@pytest.mark.parametrize(("version", "layout"), [((3, 14), (3, 14)), ((3, 15), (3, 15)), (NEWER, (3, 15))])
def test_the_fields_are_found_by_the_table_also_of_a_version_that_nobody_knows(version, layout):
    one = MadeUp(version, layout)
    one.require()
    remote = remote_debug.find(own_memory(), one.python)
    assert remote == remote_debug.RemoteDebug(
        own_memory(), True, one.thread + 16, one.thread + 128, one.thread + 132, 512
    )


@pytest.mark.parametrize(
    ("check", "otherwise"),
    [
        ("debug table version: 3.15", {"says": (3, 15)}),
        ("release: a pre-release", {"level": BETA}),
        ("debug table size: 760 bytes, 888 in 3.15", {"layout": (3, 14)}),
        ("debug table size: 896 bytes, 888 in 3.15", {"runtime_state__finalizing": 920}),
        ("debug table offsets: eval_breaker lies outside", {"debugger_support__eval_breaker": SIZE}),
        ("debug table offsets: debugger_script_path lies outside", {"thread_state__size": 512}),
        (
            "debug table offsets: debugger_script_path_size lies outside",
            {"debugger_support__debugger_script_path_size": 0},
        ),
        ("main thread: not where the table says", {"thread_state__interp": 24}),
    ],
)
def test_a_newer_version_that_is_otherwise_is_refused_by_the_name_of_the_check(check, otherwise):
    one = MadeUp(NEWER, **otherwise)
    assert check in refused(one)
    assert remote_debug.find(own_memory(), one.python) is None
    one.require(is_forced=True)  # enters with a stop, which needs no table
    MadeUp(tested_versions.NEWEST_PYTHON, **otherwise).require()  # enters with a stop, as such builds always did


def test_a_newer_version_without_a_table_is_refused():
    one = MadeUp(NEWER)
    one.put(one.python.symbols[RUNTIME], b"whatever")
    assert "debug table: there is none" in refused(one)


def test_versions_are_compared_by_their_minor_and_named_when_they_are_newer():
    newest = (f"{tested_versions.NEWEST_PYTHON[0]}.{tested_versions.NEWEST_PYTHON[1]}.9", "2.15.3+cu132")
    assert tested_versions.untested(*newest) == ""
    assert (
        tested_versions.untested("3.16.0", newest[1])
        == "not yet tested on CPython 3.16 (the newest tested is 3.15); all checks hold"
    )
    both = tested_versions.untested("3.16.0", "3.0.0a1")
    assert "CPython 3.16" in both
    assert "torch 3.0" in both
    assert tested_versions.minor("none") == (0, 0)


def a_torch(**changed):
    """Return torch with another version, and with some of its parts changed."""
    parts = {name: getattr(torch, name) for name in ("nn", "optim", "autograd", "Tensor", "_C")}
    return SimpleNamespace(**{"__version__": "9.9.0", **parts, **changed})


def test_a_free_threaded_build_is_refused_in_the_process_too(monkeypatch):
    monkeypatch.setattr(sys, "abiflags", "t")
    with pytest.raises(TargetUnsupported) as caught:
        bootstrap.start({})
    assert caught.value.reason == "free-threaded"


@pytest.mark.parametrize("version", ["1.13.0a0", "2.0.1+cu117"])
def test_an_older_torch_is_refused_even_if_it_has_all_parts(version):
    with pytest.raises(TargetUnsupported, match=f"torch {re.escape(version)} is too old; .* 2.1 and newer") as caught:
        of_torch.require(a_torch(__version__=version))
    assert caught.value.reason == "torch-version"


def test_the_oldest_torch_and_one_without_a_version_are_not_refused():
    of_torch.require(a_torch(__version__="2.1.0"))
    of_torch.require(a_torch(__version__="unknown"))


def test_a_newer_torch_that_has_all_parts_is_not_refused():
    of_torch.require(a_torch())
    assert all(check.holds for check in of_torch.checks(torch))


@pytest.mark.parametrize(
    ("changed", "check"),
    [
        ({"nn": SimpleNamespace(Module=type("Module", (), {"__call__": len}))}, "nn.Module.__call__: is a builtin"),
        ({"autograd": SimpleNamespace()}, "autograd.backward: there is none"),
        ({"_C": SimpleNamespace()}, "_C._DisableTorchDispatch: there is none"),
    ],
)
def test_a_newer_torch_that_is_otherwise_is_refused_by_the_name_of_the_check(changed, check):
    with pytest.raises(TargetUnsupported) as caught:
        of_torch.require(a_torch(**changed))
    assert caught.value.reason == "torch-version"
    assert check in caught.value.message
    of_torch.require(SimpleNamespace(**{**vars(a_torch(**changed)), "__version__": "2.13.0"}))
