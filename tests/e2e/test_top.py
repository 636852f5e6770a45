"""`hookd top` in a real terminal, on a running training: what it shows, its keys, and what the target notices."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.support import terminal, tool
from tests.support.environment import TARGETS, bare_python
from tests.support.processes import wait_until
from tests.support.terminal import Terminal
from tests.support.tool import HOOKD

pytestmark = [
    pytest.mark.usefixtures("attachable"),
    pytest.mark.skipif(not terminal.is_there, reason="needs tmux"),
]

TOP = " ".join((*HOOKD, "top"))
PLUGINS = ("-p", "timing", "-p", "activations", "-p", "nan")


@contextlib.contextmanager
def trained(folder):
    """Start a transformer's training under `hookd run`, with the daemon of that; yield the pid of the training."""
    program = [bare_python(), TARGETS / "transformer.py", "--steps", "1000000", "--pause", "0.02"]
    with tool.run(*PLUGINS, "--listen", "127.0.0.1:0", program=program, XDG_RUNTIME_DIR=folder) as process:
        page = tool.Page.below(process)
        pid = page.read().identity["pid"]
        wait_until(lambda: page.values().get("hookd_steps", {}).get((), 0) > 3, what="its first steps")
        page.close()
        yield pid


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    with trained(tmp_path_factory.mktemp("run")) as pid:
        yield pid


@pytest.fixture
def open_terminal(stack, tmp_path):
    def opened(width=80, height=24, **environment):
        return stack.enter_context(Terminal(tmp_path, width, height, **environment))

    return opened


def top_pid(screen_pid):
    """Return the pid of `hookd top` below the terminal's shell."""
    shell = psutil.Process(screen_pid)
    return wait_until(lambda: next((one.pid for one in shell.children() if "top" in one.cmdline()), None), what="top")


def shell_pid(opened):
    return int(opened.tmux("display-message", "-p", "#{pane_pid}"))


def is_as_before(opened):
    """Return whether the shell has its terminal back: the cursor, echo, lines, and its own screen."""
    opened.wait_for_shell()
    opened.type("clear; stty -a | grep -oE -- '-?(icanon|echo)\\b'; echo ==''==")
    lines = opened.wait("====")
    assert "icanon" in lines
    assert "echo" in lines
    assert opened.tmux("display-message", "-p", "#{cursor_flag}#{alternate_on}#{wrap_flag}").strip() == "101"


def test_targets_then_modules_at_80_columns(training, open_terminal):
    opened = open_terminal()
    opened.type(TOP)
    lines = opened.wait(lambda seen: re.search(rf"{training} .*running +\d+ +\d", "\n".join(seen)))
    assert len(lines) == 24
    assert lines[0].startswith("hookd top: ")
    assert re.match(r" +PID RUN +RANK USER +STATE +STEP STEP/S +A STEP +LOSS INC$", lines[1])
    opened.press("/")
    opened.tmux("send-keys", "-l", str(training))
    opened.press("Enter", "Enter")
    lines = opened.wait(lambda seen: re.search(r"^\(root\) +\d+\.\d%", "\n".join(seen), re.MULTILINE))
    assert re.search(rf"process {training} of \S+: running", lines[0])
    assert lines[2].startswith("a step: ")
    shares = [float(line.split()[1].rstrip("%")) for line in lines[4:10]]
    assert shares == sorted(shares, reverse=True)
    assert shares[1] > 0
    opened.press("t", "/")
    opened.tmux("send-keys", "-l", "linear1")
    lines = opened.wait("/linear1_")
    assert sum("linear1" in line for line in lines[4:]) > 1
    assert lines[4].startswith("(root)")
    assert lines[5].startswith("  ")
    opened.press("Escape")
    opened.wait(lambda seen: "linear1_" not in seen[-2])
    opened.press("h")
    opened.wait("q  F10 Ctrl-C   quit")
    opened.press("x", "Escape")
    # The help contains the word too, and an ESC that is followed by q at once is Alt-q.
    opened.wait(lambda seen: "STEP/S" in seen[1])
    opened.press("q")
    is_as_before(opened)


def test_a_wider_terminal_has_more_columns_at_once(training, open_terminal):
    opened = open_terminal(120, 40)
    opened.type(f"{TOP} {training}")
    lines = opened.wait("UPDATE")
    assert len(lines) == 40
    opened.resize(80, 24)
    lines = opened.wait(lambda seen: seen[3].startswith("MODULE ") and "TYPE" not in seen[3] and "q quit" in seen[-1])
    assert len(lines) == 24
    opened.resize(40, 10)
    lines = opened.wait(lambda seen: seen[3].startswith("MODULE ") and "GRAD" not in seen[3] and "q quit" in seen[-1])
    assert len(lines) == 10
    assert max(map(len, lines)) <= 40
    opened.press("C-c")
    opened.wait_for_shell()
    opened.type("echo status $?")
    opened.wait("status 130")
    is_as_before(opened)


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "linux"), ("TERM", "dumb")])
def test_without_colour_it_says_the_same(training, open_terminal, variable, value):
    opened = open_terminal()
    opened.type(f"{variable}={value} {TOP}")
    opened.wait(lambda seen: re.search(rf"{training} .*running +\d+ +\d", "\n".join(seen)))
    colours = re.findall(r"\x1b\[(?:[\d;]*;)?[34][0-7][\d;]*m", opened.tmux("capture-pane", "-p", "-e"))
    assert not colours or value == "linux"
    opened.press("q" if value != "dumb" else "C-c")
    is_as_before(opened)


def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_takes_it_back(training, open_terminal):
    opened = open_terminal()
    opened.type(f"{TOP} {training}")
    opened.wait("by SHARE")
    opened.press("C-z")
    opened.wait("Stopped")
    is_as_before(opened)
    opened.type("fg")
    opened.wait("by SHARE")
    pid = top_pid(shell_pid(opened))
    os.kill(pid, signal.SIGSTOP)
    opened.wait("Stopped")
    opened.type("fg")
    wait_until(lambda: opened.in_front() != "bash", what="top")  # its earlier output is still on the screen
    os.kill(pid, signal.SIGTERM)
    opened.wait_for_shell()
    opened.type("echo status $?")
    opened.wait("status 143")
    is_as_before(opened)


def test_a_target_that_stands_still_is_seen_and_is_not_touched(training, open_terminal):
    """A stopped process cannot answer, and is not woken: not one context switch, no connection."""
    os.kill(training, signal.SIGSTOP)
    try:
        wait_until(
            lambda: set(lines_of(training, "State")) == {"State:\tT (stopped)"}, what="the stop of all its threads"
        )
        opened = open_terminal()
        before = lines_of(training, "ctxt_switches")
        opened.type(f"{TOP} -d 0.2 {training}")
        lines = opened.wait(lambda seen: re.search(r"^\(root\) +[\d.]+%", "\n".join(seen), re.MULTILINE))
        reader = psutil.Process(top_pid(shell_pid(opened)))
        links = [os.readlink(link) for link in Path(f"/proc/{reader.pid}/fd").iterdir() if link.exists()]
        own = len(reader.children())  # a child of its own reads /proc/PID/maps in its place
        assert own <= 1
        # The other two are the pair with which asyncio wakes itself.
        assert len([link for link in links if link.startswith("socket:")]) == own + 2
        assert any("memfd:hookd-page" in link for link in links)
        assert lines[0].startswith("transformer.py rank 0")
        reads = io_of(reader.pid)
        wait_until(lambda: io_of(reader.pid) > reads + 100, what="some more refreshes")
        assert lines_of(training, "ctxt_switches") == before
        opened.press("q")
    finally:
        os.kill(training, signal.SIGCONT)


def io_of(pid):
    """Return the number of system calls by which a process has read."""
    return int(re.search(r"syscr: (\d+)", Path(f"/proc/{pid}/io").read_text()).group(1))


def lines_of(pid, word):
    """Return the lines with a word in the kernel's status of each thread."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(line for task in tasks for line in (task / "status").read_text().splitlines() if word in line)


def test_without_a_terminal_there_is_one_table_or_json(training):
    lines = tool.hookd("top", str(training)).splitlines()
    assert lines[0].split()[:3] == ["MODULE", "TYPE", "SHARE"]
    assert lines[1].startswith("(root) ")
    rows = [row for row in tool.hookd_json("top", "--once", "-d", "0.5") if row["pid"] == training]
    assert rows[0]["steps_per_s"] > 0
    assert rows[0]["state"] == "running"
    found = json.loads(tool.hookd("top", rows[0]["run"], "--json", "-d", "0.2"))
    assert training in [row["pid"] for row in found]
    assert tool.hookd("top", "no-such-run", status=4) == ""
    assert tool.hookd("top", str(os.getpid()), status=4) == ""


def test_one_that_ends_stays_and_one_that_comes_appears(open_terminal, stack, tmp_path):
    training = stack.enter_context(trained(tmp_path))
    opened = open_terminal()
    opened.type(TOP)
    opened.wait(f"{training} ")
    program = [bare_python(), TARGETS / "mlp.py", "--steps", "1000000", "--pause", "0.05"]
    second = stack.enter_context(tool.run("-p", "timing", "--listen", "127.0.0.1:0", program=program))
    opened.wait(lambda seen: any("mlp.py" in line and "running" in line for line in seen))
    os.kill(training, signal.SIGKILL)
    lines = opened.wait(lambda seen: any(f" {training} " in line and "running" not in line for line in seen))
    assert re.search(rf"{training} transf\S+ +0 \S+ +(ended|killed|SIGKILL|exited)", "\n".join(lines))
    assert second.popen.poll() is None
    opened.press("q")
