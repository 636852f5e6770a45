"""`hookd demo` plays to its end by itself; Ctrl-C ends it in order."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.environment import bare_python, tool_environment
from tests.support.processes import Process, wait_until

CONSOLE = Path(sys.executable).with_name("hookd")

pytestmark = pytest.mark.skipif(not CONSOLE.exists(), reason="hookd is not installed here")


def test_the_demo_shows_the_whole_way():
    with Process([CONSOLE, "demo", "--python", bare_python()], env=tool_environment()) as process:
        text = "\n".join(process.finish())
    assert re.search(r"attached by (ptrace|remote-debug)", text)
    assert re.search(r"attention +Attention +\d+", text)
    assert re.search(r"curl http://127\.0\.0\.1:\d+/metrics", text)
    assert re.search(r'hookd_target_up{rank="0",run="train\.py@[0-9a-f]{8}"} 1\.0', text)
    assert re.search(r"hookd: +first NaN: blocks\.2\.down output at step \d+", text)
    assert "nn.Module.__call__ is the original object again" in text
    assert "identical, bit for bit" in text
    (words,) = re.findall(r"Next: (.*) ps, ", text)
    with Process([*shlex.split(words), "version"], env=tool_environment()) as process:
        assert re.match(r"hookd \d", process.finish()[0])


def test_ctrl_c_ends_the_demo_and_what_it_started():
    with Process([CONSOLE, "demo", "--python", bare_python()], env=tool_environment()) as process:
        process.expect("it knows nothing of hookd")
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.signal(signal.SIGINT)
        assert process.wait() == 130, process.describe()
        wait_until(lambda: not any(child.is_running() for child in children), what="the end of what the demo started")
