"""A real daemon with a webhook, and the commands that list its incidents and make reports of them."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import signal
import sqlite3
import threading

import pytest

from hookd.tool.daemon.incidents.store import NAME, IncidentStore
from hookd.tool.linux.owner import user_name
from tests.support.daemon import tell
from tests.support.environment import tool_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import HOOKD, hookd, hookd_json, start_hookd


@pytest.fixture
def posts(stack):
    """The incidents that were sent to a webhook at `posts.url`."""
    got = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.shutdown)
    return f"http://127.0.0.1:{server.server_port}/", got


def posted(got, run):
    """Return the incidents of a run that were posted."""
    return [incident for one in got for incident in one["incidents"] if incident["run"] == run]


USER = user_name(os.getuid())
FOLLOW = ["incidents", "--follow", "--json"]


def asked(*words):
    """Return the messages of a command that prints no data."""
    with start_hookd(*words) as process:
        assert process.wait() == 0, process.describe()
        return "\n".join(process.err)


@pytest.fixture
def follow(stack):
    def start(*words):
        return stack.enter_context(start_hookd(*FOLLOW, *words))

    return start


def followed(follower, kind, pid):
    """Return the incident of that kind and process; others on this machine may have some as well."""
    return json.loads(follower.expect(rf'(?=.*"kind": "{kind}")(?=.*"pid": {pid}\b)').string)


PAGER = """
import pathlib

from hookd.serving import DaemonPlugin, hookimpl


class Pager(DaemonPlugin):
    name = "pager"

    @hookimpl
    def incident(self, incident):
        with pathlib.Path(__file__).with_name("paged").open("a") as file:
            print(incident["id"], incident["kind"], incident["detail"].get("shape"), file=file)
        raise RuntimeError("and fails")
"""


def test_incidents_are_listed_followed_reported_and_posted_and_outlive_target_and_daemon(
    serve, hold, tmp_path, posts, follow
):
    (url, got), run = posts, f"run-{tmp_path.name}"
    config = tmp_path / "hookd.toml"
    (plugins := tmp_path / "plugins").mkdir()
    (plugins / "pager.py").write_text(PAGER)
    config.write_text(f'[attach]\nplugin_dirs = ["{plugins}"]\n[[webhook]]\nurl = "{url}"\n')
    first, second = hold(run=run, rank=0, world_size=2), hold(run=run, rank=1, world_size=2)
    daemon = serve("--config", config)
    wait_until(lambda: len(daemon.rows(run)) == 2, what="discovery")
    host = ("--host", f"unix://{tmp_path}/control.sock")
    follower = follow(*host)
    for holder, seconds in ((first, 0.1), (second, 0.3)):
        tell(holder, steps=[[seconds] * 20])
    tell(first, incident={"kind": "nan", "message": "first <b>NaN</b>", "module": "fc1", "step": 3, "shape": [2, 2]})

    # listed, followed, posted
    (row,) = wait_until(lambda: hookd_json("incidents", "--run", run, *host)["incidents"], what="the incident")
    number = row["id"]  # others may train on this machine as well, and have incidents
    assert (row["kind"], row["pid"], row["rank"], row["user"]) == ("nan", first.pid, "0", USER)
    assert re.search(
        rf"#{number}  .*  nan  +{run}/0 \({first.pid} of {USER}\)  first", hookd("incidents", "--kind", "nan", *host)
    )
    assert hookd("incidents", "--pid", str(second.pid), *host) == ""
    assert asked("incidents", "--kind", "nan", *host) == ""
    assert re.search(
        "no incidents of kind 'nam'; there are incidents of .*nan", asked("incidents", "--kind", "nam", *host)
    )
    assert re.search(
        rf"no incidents of run '{run}x'; there are incidents of .*{run}", asked("incidents", "--run", f"{run}x", *host)
    )
    with Process(
        ["bash", "-c", f"{shlex.join([*HOOKD, *FOLLOW])} {shlex.join(host)} | head -n 1"], env=tool_environment()
    ) as one:
        (line,) = one.finish()  # though there is no further incident for now
        assert json.loads(line)["id"] <= number
    of_another = hookd("report", str(second.pid), *host)
    assert "incidents: none of this rank" in of_another
    assert f"of rank 0 (process {first.pid}): first <b>NaN</b>" in of_another
    assert followed(follower, "nan", first.pid)["id"] == number
    (post,) = wait_until(lambda: posted(got, run), what="the post")
    assert post["user"] == USER
    assert post["command"] == f"hookd report '#{number}'"

    # reported: the process, the run, the incident; the last words of one that was killed
    second.signal(signal.SIGKILL)
    lost = followed(follower, "lost", second.pid)["id"]
    report = hookd_json("report", str(second.pid), *host)
    assert [(one["kind"], one["id"]) for one in report["incidents"]] == [("lost", lost)]
    assert (report["curve"][-1]["step"], report["curve"][-1]["seconds"]) == (20, 0.3)
    reported = hookd_json("report", run, *host)
    assert [(one["target"]["rank"], one["target"]["state"]) for one in reported["targets"]] == [
        ("0", "attached"),
        ("1", "lost"),
    ]
    assert [one["id"] for one in reported["incidents"]] == [number, lost]
    assert hookd_json("report", f"#{number}", *host)["target"]["pid"] == first.pid
    assert "shape: 2, 2" in hookd("report", f"#{number}", *host)
    assert "there is no incident" in json.loads(hookd("report", "#99999", "--json", *host, status=4))["error"]
    page = tmp_path / "report.html"
    hookd("report", run, "--html", page, *host)
    assert "first &lt;b&gt;NaN" in page.read_text()
    assert page.stat().st_mode & 0o777 == 0o600

    # without the daemon, from its file; as anybody's sqlite3 would read it
    follower.signal(signal.SIGINT)
    assert follower.wait() == 130
    daemon.process.signal(signal.SIGKILL)
    daemon.process.wait()
    state = {"HOOKD_STATE_DIR": tmp_path / "state", "XDG_RUNTIME_DIR": tmp_path / "none", "HOOKD_HOST": ""}
    offline = json.loads(hookd("incidents", "--run", run, "--state-dir", tmp_path / "state", "--json"))["incidents"]
    assert [one["id"] for one in offline] == [number, lost]
    assert f"incident #{number}: nan" in hookd("report", f"#{number}", **state)
    with sqlite3.connect(f"file:{tmp_path / 'state' / NAME}?mode=ro", uri=True) as file:
        assert [kind for (kind,) in file.execute("SELECT kind FROM readable WHERE run = ?", [run])] == ["nan", "lost"]
        counted = "SELECT COUNT(*), COUNT(delivered) FROM notices WHERE incident IN (?, ?)"
        notices = file.execute(counted, [number, lost]).fetchone()
    file.close()
    assert notices == (4, 4), "of the webhook and of the plugin"

    ours = {str(number), str(lost)}

    def paged():
        return [line for line in (plugins / "paged").read_text().splitlines() if line.split()[0] in ours]

    # a daemon that follows it reports nothing twice
    daemon = serve("--config", config)
    wait_until(lambda: daemon.rows(run), what="the target is found again")
    tell(first, incident={"kind": "hang", "message": "silent"})
    wait_until(lambda: len(posted(got, run)) > 2, what="the next post")
    assert [one["kind"] for one in posted(got, run)] == ["nan", "lost", "hang"]
    ours.add(str(hookd_json("incidents", "--run", run, *host)["incidents"][-1]["id"]))
    wait_until(lambda: len(paged()) == 3, what="the call of the plugin")
    assert [line.split()[1] for line in paged()] == ["nan", "lost", "hang"]
    assert paged()[0] == f"{number} nan [2, 2]"


def test_equal_incidents_are_one_everywhere_and_of_a_flood_it_is_reported_what_was_dropped(
    serve, hold, tmp_path, posts, follow
):
    (url, got), run = posts, f"run-{tmp_path.name}"
    config = tmp_path / "hookd.toml"
    config.write_text(f'[[webhook]]\nurl = "{url}"\n')
    holder, daemon = hold(run=run), serve("--config", config)
    wait_until(lambda: daemon.rows(run), what="discovery")
    host = ("--host", f"unix://{tmp_path}/control.sock")
    follower = follow("--run", run, *host)
    for loss in (1.5, 22.25, 3.125):
        tell(holder, incident={"kind": "loss_spike", "message": f"loss {loss} is too high", "module": "fc1"})

    def rows(**wanted):
        return daemon.client.incidents(run=run, **wanted)

    (row,) = wait_until(lambda: [one for one in rows() if one["count"] == 3], what="all three")
    assert followed(follower, "loss_spike", holder.pid)["id"] == row["id"]
    reported = "loss 1.5 is too high (3 times, last at 20"
    assert reported in hookd("incidents", "--run", run, *host)
    assert reported in hookd("report", f"#{row['id']}", *host)
    assert reported in hookd("report", str(holder.pid), *host)
    assert reported in hookd("report", run, *host)
    assert "loss 1.5 is too high (3 times)" in " ".join(hookd("status", *host).split())
    assert [one["count"] for one in hookd_json("report", str(holder.pid), *host)["incidents"]] == [3]
    for page in ("/", f"/run/{run}"):
        assert reported in daemon.get(page)
    of_itself = daemon.get(f"/incident/{row['id']}")
    assert "loss 1.5 is too high" in of_itself
    assert "3 times, last at 20" in of_itself
    (post,) = wait_until(lambda: posted(got, run), what="the post")
    assert post["id"] == row["id"]

    # a flood of different ones
    for n in range(400):
        name = "".join(chr(ord("a") + int(digit)) for digit in str(n))
        tell(holder, incident={"kind": "dead", "message": f"layer {name} is dead"})
    follower.expect('"kind": "dropped"')
    (flood,) = wait_until(lambda: rows(kind="dropped"), what="what was dropped")
    assert re.fullmatch(
        rf"[\d,]+ more incidents of run {run}, rank 0 \(process {holder.pid} of user {USER}\) were dropped in \d+ s",
        flood["message"],
    )
    daemon.process.expect(r"hookd WARNING: [\d,]+ more incidents of run .* were dropped in \d+ s")
    assert 0 < daemon.metrics().total("hookd_incidents_dropped_total", run=run) < 400
    assert f"incident #{flood['id']}: dropped" in hookd("report", f"#{flood['id']}", *host)
    assert row["id"] in {one["id"] for one in rows()}


def test_a_daemon_that_is_stopped_is_named_and_waited_for(serve, hold, tmp_path, follow):
    run = f"run-{tmp_path.name}"
    holder, daemon = hold(run=run), serve()
    wait_until(lambda: daemon.rows(run), what="discovery")
    host = ("--host", f"unix://{tmp_path}/control.sock")
    follower = follow("--run", run, *host)
    tell(holder, incident={"kind": "nan", "message": "first"})
    followed(follower, "nan", holder.pid)
    daemon.process.signal(signal.SIGSTOP)
    with start_hookd("status", *host) as status:
        assert status.wait() == 1
        output = " ".join(status.err)
    assert f"(process {daemon.process.pid}) does not answer within 10 s" in output
    assert "hint: It is stopped, hangs" in output
    follower.expect("does not answer within 10 s; waiting for it")
    daemon.process.signal(signal.SIGCONT)
    tell(holder, incident={"kind": "hang", "message": "second"})
    followed(follower, "hang", holder.pid)


def test_a_run_whose_name_another_user_has_had_is_not_mixed_with_it(serve, hold, tmp_path):
    stranger, run = 4_000_000_001, f"run-{tmp_path.name}"
    store = IncidentStore.open(tmp_path / "state")
    store.add(
        (1, 1, 1), run, "0", [{"seq": 1, "time": 1000.0, "kind": "nan", "message": "of another user"}], owner=stranger
    )
    store.close()
    holder = hold(run=run)
    daemon = serve("--linger-s", "0.5")
    host = ("--host", f"unix://{tmp_path}/control.sock")
    wait_until(lambda: daemon.rows(run), what="discovery")
    tell(holder, incident={"kind": "nan", "message": "ours", "module": "fc1", "step": 3})
    (row,) = wait_until(lambda: hookd_json("incidents", "--run", run, *host)["incidents"], what="the incident")
    assert (row["user"], row["message"]) == (USER, "ours")
    assert hookd_json("incidents", "--run", run, "--user", str(stranger), *host)["incidents"][0]["user"] == str(
        stranger
    )
    assert "of another user" not in daemon.get(f"/run/{run}")
    assert [one["message"] for one in hookd_json("report", run, *host)["incidents"]] == ["ours"]

    holder.signal(signal.SIGKILL)
    wait_until(lambda: not daemon.rows(run), what="the end of the linger time")
    assert (
        f"several users have had a run '{run}'" in json.loads(hookd("report", run, "--json", *host, status=2))["error"]
    )
    listed = hookd("incidents", "--run", run, *host)
    assert re.search(rf"\(1 of {stranger}\) +of another user", listed)
    assert re.search(rf"\({holder.pid} of {USER}\) +ours", listed)
    page = daemon.get(f"/run/{run}")
    assert ">user</th>" in page
    assert "of another user" in page
