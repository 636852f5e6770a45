"""`hookd stack`, `snapshot` and `eval` on a real training that knows nothing of hookd, as a person types them."""

from __future__ import annotations

import contextlib
import json
import os
import signal

import pytest

from hookd.errors import HookdError
from hookd.tool.attach import py_spy
from hookd.tool.attach.discover import find_page
from hookd.tool.attach.modules import snapshot
from hookd.tool.linux.owner import user_name
from tests.support import forked, training
from tests.support.daemon import Daemon
from tests.support.processes import Process, wait_until
from tests.support.tool import start_hookd
from tests.support.training import Job

pytestmark = [pytest.mark.usefixtures("attachable")]

PUPPET = Job("puppet.py")


@pytest.fixture
def target(stack):
    environment = training.environment(HOOKD_RUN=f"ask-{os.getpid()}")
    process = stack.enter_context(Process(PUPPET.command(), env=environment, stdin=True, popen=forked.start))
    process.expect("^ready$")
    return process


@pytest.fixture
def daemon(stack, tmp_path):
    (tmp_path / "hookd.toml").write_text("[eval]\nallow = true\n")
    daemon = Daemon(tmp_path, "--config", tmp_path / "hookd.toml")
    stack.callback(daemon.process.close)
    return daemon


def asked(daemon, *words, status=0):
    """Run a command; return its output on stdout and on stderr."""
    host = () if words[0] == "snapshot" else ("--host", f"unix://{daemon.client.path}")
    with start_hookd(*words, *host, COLUMNS="80") as process:
        assert process.wait() == status, process.describe()
        return "\n".join(process.out), "\n".join(process.err)


def test_a_live_target_answers_and_a_stopped_one_is_reported(target, daemon):
    pid = str(target.pid)
    daemon.client.attach(target.pid, timeout_s=60)
    wait_until(lambda: snapshot(target.pid)["modules"], what="a call of the model")
    shown, _ = asked(daemon, "snapshot", pid)
    assert "observed" in shown
    assert max(map(len, shown.splitlines())) <= 80
    parameters = snapshot(target.pid)["totals"]["parameters"]
    assert asked(daemon, "eval", pid, "sum(p.numel() for p in model.parameters())")[0] == str(parameters)
    out, err = asked(daemon, "eval", pid, "1 / 0", status=1)
    assert (out, "ZeroDivisionError" in err) == ("", True)
    log = "\n".join(daemon.process.err)
    assert f"eval in process {pid} begins, for user {user_name(os.geteuid())} " in log
    found = json.loads(asked(daemon, "stack", pid, "--json")[0])
    assert found["ways"]["python"] == {"by": "agent", "problem": "", "seconds": found["ways"]["python"]["seconds"]}
    assert any(frame["file"].endswith("puppet.py") for frame in found["threads"][0]["frames"])

    target.signal(signal.SIGSTOP)
    found = json.loads(asked(daemon, "stack", pid, "--json")[0])
    main = found["threads"][0]
    assert (found["state"], main["beat"]["moves"], main["tid"]) == ("stopped", False, target.pid)
    assert "stopped" in found["ways"]["python"]["problem"]
    if py_spy.program():
        assert found["ways"]["python"]["by"] == "py-spy, non-blocking"
        assert any(frame["file"].endswith("puppet.py") for frame in main["frames"])
    else:
        assert "hookd[stack]" in found["ways"]["python"]["problem"]
    with pytest.raises(HookdError) as caught:
        daemon.client.evaluate(target.pid, "1", 5.0)
    assert caught.value.reason == "stopped"
    target.signal(signal.SIGCONT)

    def outcomes():
        rows = daemon.client.incidents(pid=pid, kind="eval")
        return {row["detail"]["expression"]: row["detail"]["outcome"] for row in rows}

    wait_until(lambda: "1 / 0" in outcomes(), what="the record of what was evaluated")
    assert outcomes()["1 / 0"] == "raised: ZeroDivisionError"

    stuck = daemon.client.evaluate(target.pid, "__import__('time').sleep(3600)", 0.1)
    assert stuck["state"] == "running"
    answer = daemon.client.detach(target.pid)
    assert answer["restored"] == "identity"
    assert any("evaluates" in one for one in answer["residue"])
    wait_until(lambda: find_page(target.pid) is None, what="the agent's end, whatever still runs")


def test_without_a_daemon_nothing_is_evaluated_and_a_stranger_has_no_stack(target, tmp_path):
    nobody = {"XDG_RUNTIME_DIR": str(tmp_path), "HOOKD_CONTROL": ""}
    with contextlib.ExitStack() as stack:
        for words, status, reported in (
            (("eval", str(target.pid), "1"), 3, "[eval] allow = true"),
            (("stack", str(target.pid)), 4, "hookd attach"),
            (("snapshot", str(target.pid)), 4, "hookd attach"),
        ):
            process = stack.enter_context(start_hookd(*words, **nobody))
            assert process.wait() == status, process.describe()
            assert reported in "\n".join(process.err)
