"""Ends of a target: each is described correctly, with its last activity, and kept by the daemon."""

from __future__ import annotations

import contextlib
import re
import signal
import sqlite3
import urllib.request

import pytest

from hookd.tool.linux import oom
from tests.support import cgroup, forked, tool, training
from tests.support.daemon import Daemon
from tests.support.processes import Process, wait_until
from tests.support.training import Job

pytestmark = [
    pytest.mark.usefixtures("attachable"),
]

MORTAL = Job("mortal.py")
LIMIT = 400 << 20


def begin(stack):
    """Start a target that ends in a given way."""
    process = Process(MORTAL.command(), env=training.environment(), stdin=True, popen=forked.start)
    stack.enter_context(process)
    return process


def attached(stack, directory, processes):
    """Start a daemon, attach to all, and wait until each has taken steps that are metered."""
    daemon = Daemon(directory)
    stack.callback(daemon.process.close)
    for process in processes:
        process.expect("^ready$")
    pids, host = [str(process.pid) for process in processes], f"unix://{daemon.client.path}"
    tool.hookd("attach", *pids, "-p", "timing", "--host", host, "--timeout", "60")
    wait_until(lambda: all(row(daemon, one)["step"]["counted"] > 40 for one in processes), what="steps of all")
    wait_until(lambda: all(is_metered(daemon, one) for one in processes), what="metered steps of all")
    return daemon


def is_metered(daemon, process):
    """Whether calls have been recorded: those of metered steps are, and the first comes a second or two after the attach."""
    own = {label: row(daemon, process)[label] for label in ("run", "rank")}
    return daemon.metrics().total("hookd_overhead_seconds_total", plugin="hookd", **own) > 0


def story(daemon, process):
    """Return the incident of a target's end."""
    return wait_until(lambda: next(iter(incidents(daemon, process)), None), what=f"the end of {process.describe()}")


def incidents(daemon, process):
    return daemon.client.incidents(pid=process.pid)


def row(daemon, process):
    return next(row for row in daemon.client.targets() if row["pid"] == process.pid)


def test_every_end_is_classified_by_the_kernel_and_reported_with_the_last_activity(stack, tmp_path):
    group = stack.enter_context(cgroup.limited(LIMIT))
    failing, faulty, hoarder, killed = processes = [begin(stack) for _ in range(4)]
    for process in (hoarder, killed):
        (group / "cgroup.procs").write_text(str(process.pid))
    daemon = attached(stack, tmp_path, processes)
    failing.send("fail")
    assert_reported(
        daemon,
        failing,
        "exit 1",
        r"ended with exit code 1 after RuntimeError: planted .* \(module 2 \(Layer\), mortal.py:\d+ in fail\)$",
    )
    faulty.send("segfault")
    assert_reported(
        daemon,
        faulty,
        "signal SIGSEGV",
        r"was killed by SIGSEGV \(Segmentation fault\).*; last in forward of 2 \(Layer\)$",
    )
    killed.signal(signal.SIGSTOP)  # who wants no memory is not killed for want of it, though it is in the same cgroup
    hoarder.send("hoard")
    assert_reported(daemon, hoarder, "oom", rf"{oom.KILLED} \(SIGKILL\): .*; last in forward of 2 \(Layer\)$")
    killed.signal(signal.SIGKILL)
    assert_reported(daemon, killed, "signal SIGKILL", r"was killed by SIGKILL \(Killed\)")
    assert [process.wait() for process in processes] == [1, -signal.SIGSEGV, -signal.SIGKILL, -signal.SIGKILL]
    file = tmp_path / "state" / "incidents.sqlite"
    ends = [f"process {process.pid} " for process in processes]  # others may end on this machine as well
    wait_until(lambda: all(any(one.startswith(end) for one in stored(file)) for end in ends), what="all in the file")


def served(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return tool.Metrics(answer.read().decode())


def stored(file):
    """Return the messages of the ends that are in the file by now: it is written, and made, by a thread."""
    if not file.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as database:
        try:
            return [message for (message,) in database.execute("SELECT message FROM incidents WHERE kind = 'lost'")]
        except sqlite3.OperationalError:  # it has no tables yet
            return []


def assert_reported(daemon, process, reason, message):
    reported = story(daemon, process)
    assert row(daemon, process)["reason"] == reason
    assert re.search(rf"^process {process.pid} {message}", reported["message"]), reported["message"]
    assert "\x1b" not in reported["message"]
    detail = reported["detail"]
    assert detail["known_from"] in ("pidfd", "zombie")
    assert {"call", "step", "forward", "backward", "optimizer"} <= {one["event"] for one in detail["events"]}, detail
    (main,) = (one for one in detail["threads"] if one["tid"] == process.pid)
    assert main["step"] == detail["step"] > 40, detail["threads"]
    assert detail["statistics"]["metrics"]["steps"]["steps"] == detail["step"] - 1


def test_a_command_of_hookd_run_that_is_killed_is_an_incident_also_where_nobody_else_serves(tmp_path, stack):
    places = {"HOME": tmp_path, "XDG_STATE_HOME": tmp_path, "HOOKD_STATE_DIR": tmp_path, "HOOKD_HOST": ""}
    command = tool.run("--listen", "127.0.0.1:0", "-p", "timing", program=MORTAL.command(), stdin=True, **places)
    process = stack.enter_context(command)
    url = process.expect("^metrics on (http:[^ ]+)").group(1)
    wait_until(lambda: served(url).total("hookd_target_up"), what="the companion's first look at the command")
    process.expect("^ready$")
    process.send("leave")
    assert process.wait() == 3
    (message,) = wait_until(lambda: stored(tmp_path / "incidents.sqlite"), what="the incident")
    assert "ended with exit code 3, without Python's own exit" in message
