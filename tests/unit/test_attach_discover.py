"""Which processes a tool looks at."""

from __future__ import annotations

import os
import sys

import pytest

from hookd.tool.attach import discover
from tests.support import emulated
from tests.support.processes import Process


@emulated.lacks("proc")
@pytest.mark.parametrize(
    ("scope", "is_seen"),
    [("", True), ("JOB=7", True), ("JOB", True), ("JOB=", False), ("JOB=8", False), ("OTHER", False), ("=", True)],
)
def test_a_scope_limits_the_look_to_processes_with_a_variable(stack, monkeypatch, scope, is_seen):
    program = [sys.executable, "-c", "print('ready', flush=True); input()"]
    process = stack.enter_context(Process(program, env={**os.environ, "JOB": "7"}, stdin=True))
    process.expect("ready")
    monkeypatch.setenv("HOOKD_SCOPE", scope)
    assert (discover.inspect(process.pid) is not None) is is_seen
