"""The examples that run in the daemon: real pages, the daemon's own host of plugins, and whoever they write or send to."""

from __future__ import annotations

import json

import pytest

from hookd.errors import PluginError
from hookd.testing import FakeDaemon
from tests.support.environment import REPOSITORY
from tests.support.posted import Server

EXAMPLES = REPOSITORY / "examples" / "plugins"
HOSTILE = "../../<!channel>"


def test_tensorboard_reads_curves_of_gauges_and_counters_over_steps(fake_daemon, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    what = {"dir": tmp_path / "curves", "metrics": "hookd_mine_*|hookd_steps", "every_s": 0}
    fake_daemon.start(EXAMPLES / "hookd_tensorboard.py", **what)
    (rank,) = fake_daemon.ranks(run=HOSTILE)
    for step in range(1, 4):
        rank.run_steps()
        rank.set("hookd_mine_loss", step / 2, module="a/b")
        rank.set("hookd_other", 1.0)
        fake_daemon.look(2)  # once more: no step was taken, no point
    fake_daemon.assert_metrics({"hookd_tensorboard_points_total": 6})
    rank.detach()
    fake_daemon.look()
    (folder,) = (tmp_path / "curves").iterdir()
    assert folder.name == ".._..___channel_-rank0"
    read = EventAccumulator(str(folder)).Reload()
    curves = {
        tag: [(event.step, float(tensor_util.make_ndarray(event.tensor_proto))) for event in read.Tensors(tag)]
        for tag in read.Tags()["tensors"]
    }
    assert curves == {
        "hookd_mine_loss/a/b": [(1, 0.5), (2, 1.0), (3, 1.5)],
        "hookd_steps": [(1, 1.0), (2, 2.0), (3, 3.0)],
    }


def test_slack_is_notified_once_and_of_how_many_more_there_were(stack, fake_daemon):
    server = stack.enter_context(Server())
    fake_daemon.start(EXAMPLES / "hookd_slack.py", url=server.url, kinds="nan|hang")
    bad, modules = "the loss is <!channel>\nNaN", iter("abcde")  # equal incidents are one
    for kind, run in (("nan", "llama"), ("nan", "llama"), ("lost", "llama"), ("nan", "other"), ("nan", "llama")):
        fake_daemon.incident(kind, bad, run=run, rank="3", module=next(modules))
    fake_daemon.plugin("slack").quiet_s = 0.0
    fake_daemon.incident("nan", "x" * 10_000, run="llama", rank="3")
    texts = [json.loads(body)["text"] for _, _, body in server.posts]
    assert texts[0] == "nan in llama/3: the loss is &lt;!channel&gt; NaN"
    assert texts[1].startswith("nan in other/3")
    assert texts[2].endswith("x (and 2 more before)")
    assert len(texts) == 3
    assert len(texts[2]) < 600
    fake_daemon.ranks(run=HOSTILE)
    fake_daemon.look()
    fake_daemon.assert_metrics({"hookd_slack_posts_total": 3})


def test_slack_is_notified_of_two_users_with_one_run(stack, fake_daemon):
    server = stack.enter_context(Server())
    fake_daemon.start(EXAMPLES / "hookd_slack.py", url=server.url)
    for owner in (1, 2, 1):
        row = {"owner": owner, "run": "llama", "rank": "0", "kind": "nan", "message": "first NaN"}
        fake_daemon.plugin("slack").incident(row)
    assert len(server.posts) == 2


def test_what_is_not_taken_is_an_error_and_the_next_one_is_posted(stack):
    server = stack.enter_context(Server())
    daemon = stack.enter_context(FakeDaemon()).start(EXAMPLES / "hookd_slack.py", url=server.url)
    daemon.plugin("slack").address.timeout_s = 0.2
    server.answers[:] = [500, 302, "hang"]
    for module in "abcd":  # equal incidents are one
        daemon.incident("nan", "the loss is NaN", module=module)
    assert (daemon.state("slack"), daemon.errors) == ("active", {("slack", "incident"): 3})
    assert "timed out" in daemon.last_errors[-1]["text"]
    assert len(server.posts) == 4


@pytest.mark.parametrize("options", [{}, {"url": "file:///etc/passwd"}])
def test_an_address_that_is_none_is_refused(fake_daemon, options):
    with pytest.raises(PluginError, match="the URL must begin"):
        fake_daemon.start(EXAMPLES / "hookd_slack.py", **options)


def test_without_a_directory_tensorboard_is_refused(fake_daemon):
    with pytest.raises(PluginError, match="it needs a directory"):
        fake_daemon.start(EXAMPLES / "hookd_tensorboard.py")
