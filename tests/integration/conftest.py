"""A daemon; and targets, which each test has for itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.daemon import Daemon
from tests.support.environment import tool_environment
from tests.support.processes import Process

HOLDER = Path(__file__).parents[1] / "support" / "page_holder.py"


@pytest.fixture
def serve(stack, tmp_path):
    def start(*arguments, directory=tmp_path, **environment):
        daemon = Daemon(directory, *arguments, **environment)
        stack.callback(daemon.process.close)
        return daemon

    return start


@pytest.fixture
def python_patch(monkeypatch):
    """Replace `nn.Module.__call__` in Python."""
    monkeypatch.setenv("HOOKD_ENTRY", "0")


@pytest.fixture
def entry(monkeypatch):
    """Enter `nn.Module.__call__` in C; skip the test where that cannot be."""
    from hookd.target.entry.c_entry import CannotEnterError, Entry  # noqa: PLC0415  # most tests here do without torch

    monkeypatch.delenv("HOOKD_ENTRY", raising=False)
    try:
        Entry.load(print).close()
    except CannotEnterError as why:
        pytest.skip(str(why))


@pytest.fixture(params=["entry", "python_patch"])
def either_way(request):
    """Run a test with the entry and with the patch in Python."""
    request.getfixturevalue(request.param)
    return request.param


@pytest.fixture
def run(tmp_path):
    """A run's name that no other process of this machine has: a daemon sees them all."""
    return f"run-{tmp_path.parent.name}-{tmp_path.name}-{os.getpid()}"


@pytest.fixture
def hold(stack, run):
    def start(**identity):
        command = [sys.executable, HOLDER, json.dumps({"run": run, **identity})]
        holder = stack.enter_context(Process(command, env=tool_environment(), stdin=True, popen=forked.start))
        holder.expect("ready")
        return holder

    return start
