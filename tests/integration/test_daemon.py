"""A real `hookd serve` over real processes that hold real pages: they come, go, die, lie."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import sqlite3
import stat
import sys
import urllib.error
import urllib.request

import pytest

from hookd.errors import DaemonNotRunning, HookdError, NoSuchTarget, UsageError
from hookd.tool.daemon.client import DaemonClient
from hookd.tool.linux.owner import user_name
from tests.support.daemon import Daemon, tell
from tests.support.environment import tool_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import start_hookd


def test_a_target_is_found_served_and_after_its_death_lingers_then_goes(serve, hold, run):
    holder = hold()
    tell(holder, put={"name": "hookd_steps", "kind": "counter", "value": 5})
    tell(holder, put={"name": "hookd_x_mean", "kind": "gauge", "value": 1, "labels": {"module": 'a"b\\c\nd'}})
    daemon = serve("--linger-s", "3")
    wait_until(lambda: daemon.rows(run), what="discovery")
    metrics = daemon.metrics()
    assert metrics.total("hookd_target_up", run=run) == 1
    assert metrics.labels("hookd_x_mean", "module", run=run) == {'a"b\\c\nd'}

    tell(holder, put={"name": "hookd_steps", "kind": "counter", "value": 6})
    holder.signal(signal.SIGKILL)
    wait_until(lambda: daemon.rows(run)[0]["state"] == "lost", what="the death is noticed")
    metrics = daemon.metrics()
    assert [s.value for s in metrics.select("hookd_target_up", run=run)] == [0]
    assert metrics.total("hookd_steps_total", run=run) == 6
    assert not metrics.select("hookd_x_mean", run=run)
    assert metrics.labels("hookd_target_info", "reason", run=run) == {"signal SIGKILL"}

    wait_until(lambda: not daemon.rows(run), what="the end of the linger time")
    assert run not in daemon.get("/metrics")
    kinds = [row["kind"] for row in json.loads(daemon.get(f"/api/v1/incidents?run={run}"))["incidents"]]
    assert kinds == ["lost"]
    reported = json.loads(daemon.get(f"/api/v1/incidents?run={run}"))["incidents"][0]
    assert reported["message"].startswith(f"process {holder.pid} was killed by SIGKILL (Killed)")
    assert reported["detail"]["known_from"] in ("pidfd", "zombie")
    assert reported["user"] == user_name(os.getuid())
    assert daemon.client.incidents(run=run, user=os.getuid()) == [reported]
    assert daemon.client.incidents(run=run, user=os.getuid() + 1) == []


def test_a_clean_exit_and_a_detach_are_distinguished_from_a_death(serve, hold, run):
    leaving, ending = hold(run=run + "a"), hold(run=run + "b")
    daemon = serve()
    wait_until(lambda: daemon.rows(run + "a") and daemon.rows(run + "b"), what="discovery")
    tell(leaving, leave={})
    tell(ending, state=["exited"])
    ending.popen.stdin.close()
    wait_until(lambda: daemon.rows(run + "a")[0]["state"] == "detached", what="the detach")
    wait_until(lambda: daemon.rows(run + "b")[0]["reason"] == "exited", what="the exit")
    assert not json.loads(daemon.get(f"/api/v1/incidents?run={run}b"))["incidents"]


def test_each_end_is_classified_by_what_the_kernel_knows_of_it(serve, hold, run):
    ends = {
        '{"end": [0, "exited"]}': ("exited", None),
        '{"end": [4, "exited"]}': ("exit 4", "ended with exit code 4"),
        '{"end": [3]}': ("exit 3", "ended with exit code 3, without Python's own exit: by os._exit, or by native code"),
        signal.SIGSEGV: ("signal SIGSEGV", "was killed by SIGSEGV (Segmentation fault)"),
        signal.SIGTERM: ("signal SIGTERM", "was killed by SIGTERM (Terminated)"),
    }
    holders = [hold(run=f"{run}{n}") for n in range(len(ends))]
    daemon = serve()
    rows = lambda: [row for n in range(len(ends)) for row in daemon.rows(f"{run}{n}")]  # noqa: E731
    wait_until(lambda: len(rows()) == len(ends), what="discovery")
    for holder, how in zip(holders, ends, strict=True):
        holder.signal(how) if isinstance(how, int) else holder.send(how)
    wait_until(lambda: all(row["state"] != "attached" for row in rows()), what="their ends")
    assert [row["reason"] for row in rows()] == [reason for reason, _ in ends.values()]
    assert [row["state"] for row in rows()] == ["lost" if message else "ended" for _, message in ends.values()]
    for holder, (_, message) in zip(holders, ends.values(), strict=True):
        messages = json.loads(daemon.get(f"/api/v1/incidents?pid={holder.pid}"))["incidents"]
        assert [one["message"] for one in messages] == ([] if message is None else [f"process {holder.pid} {message}"])


def test_only_an_agent_that_was_sent_away_is_taken_for_a_persons_will(serve, hold, run, tmp_path):
    """One whose lease has ended or whose attach has failed leaves by itself, and the rules go on."""
    sent, gone = hold(run=run + "a"), hold(run=run + "b")
    daemon = serve()
    wait_until(lambda: daemon.rows(run + "a") and daemon.rows(run + "b"), what="discovery")
    tell(gone, leave={"sent_away": False})
    wait_until(lambda: daemon.rows(run + "b")[0]["state"] == "detached", what="the second's end")
    tell(sent, leave={})
    (store,) = (tmp_path / "state").glob("*.sqlite")
    with contextlib.closing(sqlite3.connect(store)) as database:
        pids = wait_until(lambda: database.execute("SELECT pid FROM dismissed").fetchall(), what="the first's end")
    assert pids == [(sent.pid,)]


def test_a_process_that_becomes_another_program_is_lost(serve, hold, run):
    holder = hold()
    daemon = serve()
    wait_until(lambda: daemon.rows(run), what="discovery")
    holder.send(json.dumps({"become": ["/bin/cat"]}))  # ends with its stdin, which is ours
    wait_until(lambda: daemon.rows(run)[0]["state"] == "lost", what="the exec is noticed")
    assert daemon.rows(run)[0]["reason"] == "exec"


def test_a_restarted_daemon_finds_everything_again_and_incidents_are_kept_once(serve, hold, run):
    holder = hold()
    tell(holder, incident={"kind": "nan", "message": "first NaN", "module": "fc1", "step": 3})
    for _ in range(2):
        daemon = serve()
        wait_until(lambda: daemon.rows(run), what="discovery")  # noqa: B023
        assert [row["message"] for row in daemon.client.incidents(run=run)] == ["first NaN"]
        daemon.process.signal(signal.SIGTERM)
        assert daemon.process.wait() == 0, daemon.process.describe()
        assert not daemon.client.path.exists()


def test_a_terminal_that_is_closed_ends_it_as_a_person_would(serve):
    daemon = serve()
    daemon.process.signal(signal.SIGHUP)
    assert daemon.process.wait() == 0, daemon.process.describe()
    assert any("SIGHUP: shutting down" in line for line in daemon.process.err)


def test_an_incident_is_in_the_log_when_it_comes_also_where_the_process_ends_with_it(serve, hold, run):
    daemon, holder = serve(), hold()
    wait_until(lambda: daemon.rows(run), what="discovery")
    tell(holder, incident={"kind": "nan", "message": "first NaN: fc output", "step": 3})
    daemon.process.expect(
        rf"hookd WARNING: nan in process {holder.pid} of user {user_name(os.getuid())} \(run {run}, rank 0\) at step 3: "
        "first NaN: fc output$"
    )
    tell(holder, incident={"kind": "inf", "message": "the last word", "step": 4})
    holder.signal(signal.SIGKILL)
    daemon.process.expect(rf"hookd WARNING: inf in process {holder.pid} .* at step 4: the last word$")


def test_a_killed_daemons_socket_does_not_hinder_the_next_one(serve):
    first = serve()
    first.process.signal(signal.SIGKILL)
    first.process.wait()
    assert first.client.path.is_socket()
    assert serve().client.version()["pid"] != first.process.pid


def test_a_daemon_removes_what_killed_foreground_attaches_have_left(serve, tmp_path):
    dead, young, alive = (tmp_path / f"attach-{pid}.sock" for pid in (1, 2, 3))
    with contextlib.ExitStack() as stack:
        for path in (dead, young, alive):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            if path == alive:
                listener.listen()
        for path in (dead, alive):
            os.utime(path, (0, 0))
        assert serve().client.path.parent == tmp_path
        assert [path.exists() for path in (dead, young, alive)] == [False, True, True]


def test_a_second_daemon_learns_of_the_first(serve, tmp_path):
    daemon = serve()
    with start_hookd(
        "serve", "--listen", "127.0.0.1:0", "--control", daemon.client.path, "--state-dir", tmp_path
    ) as second:
        assert second.wait() == 1
        assert any("another daemon answers" in line for line in second.err), second.describe()
    port = daemon.url.rpartition(":")[2]
    elsewhere = ("--control", tmp_path / "x.sock", "--state-dir", tmp_path)
    with start_hookd("serve", "--listen", f"127.0.0.1:{port}", *elsewhere) as second:
        assert second.wait() == 1
        assert any("cannot listen on" in line for line in second.err), second.describe()
    assert not (tmp_path / "x.sock").exists()
    assert daemon.client.version()


def test_a_page_that_turns_hostile_marks_its_target_alone(serve, hold, run):
    bad = hold(run=run + "bad")
    hold(run=run + "good")
    daemon = serve()
    wait_until(lambda: daemon.rows(run + "bad") and daemon.rows(run + "good"), what="discovery")
    tell(bad, spoil={})
    wait_until(lambda: daemon.rows(run + "bad")[0]["state"] == "corrupt", what="the damage is noticed")
    daemon.process.expect(rf"corrupt in process {bad.pid} .*: the page of process {bad.pid} cannot be trusted")
    metrics = daemon.metrics()
    assert metrics.total("hookd_target_up", run=run + "bad") == 0
    assert metrics.total("hookd_target_state", run=run + "bad", state="corrupt") == 1
    assert metrics.total("hookd_target_up", run=run + "good") == 1
    bad.signal(signal.SIGKILL)
    wait_until(lambda: daemon.rows(run + "bad")[0]["state"] == "lost", what="the death of the corrupt one")


def test_a_forked_child_that_inherited_the_page_is_no_target(serve, hold, run):
    holder = hold()
    tell(holder, fork={})
    daemon = serve()
    wait_until(lambda: daemon.rows(run), what="discovery")
    assert [row["pid"] for row in daemon.rows(run)] == [holder.pid]


def test_another_attach_of_the_same_process_takes_over_from_the_first(serve, hold, run):
    holder = hold()
    tell(holder, put={"name": "hookd_steps", "kind": "counter", "value": 5})
    daemon = serve()
    wait_until(lambda: daemon.rows(run), what="discovery")
    tell(holder, leave={})
    tell(holder, open={})
    wait_until(lambda: not daemon.metrics().select("hookd_steps_total", run=run), what="the new page")
    assert [(row["pid"], row["state"]) for row in daemon.rows(run)] == [(holder.pid, "attached")]


def test_two_jobs_of_one_name_are_told_apart(serve, hold, run):
    first = hold(script=run)
    second = hold(script=run)
    daemon = serve()
    wait_until(lambda: len(daemon.rows(run)) == 2, what="discovery")
    assert {row["pid"]: row["run"] for row in daemon.rows(run)} == {first.pid: run, second.pid: f"{run}~{second.pid}"}


def test_the_heartbeats_age_grows_until_the_next_event(serve, hold, run):
    holder = hold()
    daemon = serve()
    wait_until(lambda: daemon.rows(run) and daemon.rows(run)[0]["heartbeat_age_s"] > 0.5, what="silence")
    tell(holder, event={})
    wait_until(lambda: daemon.rows(run)[0]["heartbeat_age_s"] < 0.5, what="the event is seen")


def test_the_control_socket_is_the_owners_alone(serve):
    daemon = serve()
    assert stat.S_IMODE(daemon.client.path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_answer_even_where_the_mode_would_let_them(serve, tmp_path):
    daemon = serve()
    for path in (tmp_path, *tmp_path.parents[:3]):
        path.chmod(path.stat().st_mode | 0o011)
    daemon.client.path.chmod(0o666)
    ask = (
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.sendall(b'GET /v1/status HTTP/1.0\\r\\n\\r\\n'); print(s.recv(4096).decode())"
    )
    command = [sys.executable, "-c", f"import os, socket, sys; os.setuid(65534); {ask}", daemon.client.path]
    with Process(command, env=tool_environment()) as other:
        other.wait()
        assert any("403" in line for line in other.out), other.describe()
        assert not any("targets" in line for line in other.out)


def test_what_the_control_api_refuses_it_refuses_with_reason_and_exit_code(serve):
    client = serve().client
    with pytest.raises(NoSuchTarget) as caught:
        client.report(2**22 + 1)
    assert (caught.value.reason, caught.value.exit_code) == ("not-attached", 4)
    for method, path, body in (
        ("POST", "/v1/attach", {}), ("POST", "/v1/attach", {"pid": "x"}), ("POST", "/v1/attach", {"pid": 1, "nope": 1}),
        ("POST", "/v1/attach", {"pid": 1, "plugins": ["No"]}), ("POST", "/v1/detach", [1]), ("GET", "/v1/nothing", None),
        ("GET", "/v1/incidents?limit=x", None), ("POST", "/v1/targets/1/plugins", {"op": "eat", "plugin": "nan"}),
    ):  # fmt: skip
        with pytest.raises(UsageError) as refused:
            client.request(method, path, body)
        assert refused.value.exit_code == 2, path
    with pytest.raises(NoSuchTarget):
        client.attach(2**22 + 1)
    with pytest.raises(HookdError):
        client.detach(os.getpid())


def test_a_failed_attach_is_counted_by_its_reason(serve):
    daemon = serve()
    with pytest.raises(NoSuchTarget) as caught:
        daemon.client.attach(2**22 + 1)
    assert daemon.metrics().total("hookd_attach_total", result=caught.value.reason) == 1


def test_it_answers_to_names_that_are_allowed_and_to_no_other(serve):
    daemon = serve("--allow-host", "node1.example", "--allow-host", "*.train.example")
    for name in ("node1.example", "gpu7.train.example:9465", "localhost"):
        assert "healthy" in daemon.get("/-/healthy", Host=name)
    with pytest.raises(urllib.error.HTTPError, match="421") as caught:
        daemon.get("/-/healthy", Host="evil.example")
    caught.value.close()


def test_nothing_on_tcp_changes_anything(serve):
    daemon = serve()
    host = daemon.url.removeprefix("http://")
    for path in ("/v1/attach", "/v1/detach", "/api/v1/targets", "/metrics", "/"):
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("POST", path, "{}", {"Content-Type": "application/json"})
        assert connection.getresponse().status in (404, 405), path
        connection.close()


def test_a_visitor_of_the_pages_changes_no_target(serve, hold, run):
    holder = hold()
    daemon = serve()
    wait_until(lambda: daemon.rows(run), what="discovery")
    tell(holder, incident={"kind": "nan", "message": "m", "module": "fc1", "step": 3})
    (incident,) = wait_until(lambda: daemon.client.incidents(run=run), what="the incident")
    host, before = daemon.url.removeprefix("http://"), [(row["pid"], row["state"]) for row in daemon.rows(run)]
    for path in ("/", f"/run/{run}", f"/run/{run}?pid={holder.pid}", f"/incident/{incident['id']}"):
        page = daemon.get(path)
        assert all('method="get"' in form for form in re.findall("<form[^>]*>", page)), path
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            connection = http.client.HTTPConnection(host, timeout=60)
            connection.request(method, path)
            assert connection.getresponse().status == 405, (method, path)
            connection.close()
    assert [(row["pid"], row["state"]) for row in daemon.rows(run)] == before


def test_the_page_of_a_process_that_has_left_a_run_does_not_show_another_in_its_place(serve, hold, run):
    holder = hold()
    daemon = serve()
    wait_until(lambda: daemon.rows(run), what="discovery")
    assert f"process {holder.pid}" in daemon.get(f"/run/{run}?pid={holder.pid}")
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        daemon.get(f"/run/{run}?pid=1")
    with caught.value as answer:
        assert "is not in run" in answer.read().decode()


def test_the_status_page_escapes_what_targets_say(serve, hold, run):
    hold(run=f"{run}<script>alert(1)</script>", script='"><img src=x onerror=alert(1)>')
    daemon = serve()
    wait_until(lambda: run in daemon.get("/"), what="the target on the status page")
    text = daemon.get("/")
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text
    with urllib.request.urlopen(daemon.url, timeout=60) as answer:
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_health_discovery_and_the_read_only_api(serve, hold, run):
    hold()
    daemon = serve()
    assert "healthy" in daemon.get("/-/healthy")
    host = daemon.url.removeprefix("http://")
    assert json.loads(daemon.get("/sd"))[0]["targets"] == [host]
    wait_until(lambda: daemon.rows(run), what="discovery")
    assert run in daemon.get("/api/v1/targets")
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        daemon.get("/api/v1/incidents?nope=1")
    caught.value.close()


def test_openmetrics_is_served_to_who_asks(serve):
    daemon = serve()
    assert daemon.get("/metrics", Accept="application/openmetrics-text; version=1.0.0").endswith("# EOF\n")
    assert "# EOF" not in daemon.get("/metrics")


def test_nobody_on_the_socket_is_a_daemon_that_does_not_run(tmp_path):
    with pytest.raises(DaemonNotRunning) as caught:
        DaemonClient(tmp_path / "none.sock").version()
    assert caught.value.exit_code == 3
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    with pytest.raises(DaemonNotRunning):
        DaemonClient(tmp_path / "dead.sock").version()


def test_the_report_of_a_target_is_what_its_page_says(serve, hold, run):
    holder = hold()
    tell(
        holder, put={"name": "hookd_timing_forward_seconds", "kind": "counter", "value": 2, "labels": {"module": "fc1"}}
    )
    daemon = serve()
    wait_until(lambda: daemon.rows(run), what="discovery")
    report = daemon.client.report(holder.pid)
    assert report["target"]["run"] == run
    assert report["modules"] == [{"name": "fc1", "type": "", "root": 0, "metrics": {"timing": {"forward_seconds": 2}}}]


def test_a_daemon_whose_parent_ignores_the_ends_of_children_does_not(tmp_path):
    daemon = Daemon(tmp_path, around=("sh", "-c", 'trap "" CHLD && exec "$0" "$@"'))
    with daemon.process, open(f"/proc/{daemon.process.pid}/status") as status:  # noqa: PTH123
        lines = status.readlines()
    ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    assert not ignored >> (signal.SIGCHLD - 1) & 1
