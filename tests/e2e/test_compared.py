"""The daemon compares the ranks of a job: which are slow, and whose replica no longer equals the others."""

from __future__ import annotations

import re
import signal

import pytest

from tests.support import forked, training
from tests.support.daemon import Daemon
from tests.support.environment import TARGETS, bare_python
from tests.support.processes import Process, wait_until
from tests.support.tool import hookd, hookd_json

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]

EVERY = 20
RUN = "replicas.py"


@pytest.fixture
def ranks(stack, tmp_path):
    command = [bare_python(), TARGETS / "replicas.py", tmp_path / "store"]
    started = [
        stack.enter_context(
            Process(command, env=training.environment(RANK=str(n), WORLD_SIZE="2"), cwd=TARGETS, popen=forked.start)
        )
        for n in range(2)
    ]
    for n, process in enumerate(started):
        process.expect(f"rank {n} trains")
    return started


@pytest.fixture
def daemon(stack, tmp_path):
    daemon = Daemon(tmp_path)
    stack.callback(daemon.process.close)
    return daemon


def test_the_slow_rank_and_the_replica_that_differs_are_named(ranks, daemon):
    equal = hookd("diff", *(str(one.pid) for one in ranks), "--what", "gradients,update", "--steps", "3")
    assert equal.startswith("Equal in "), equal
    attach = ("attach", *(str(one.pid) for one in ranks), "--host", f"unix://{daemon.client.path}", "--timeout", "60")
    hookd(*attach, "-p", "timing", "-p", f"drift:every={EVERY}", "-p", f"fingerprint:every={EVERY}")

    def values(name):
        return [int(daemon.metrics().total(name, run=RUN, rank=rank)) for rank in "01"]

    def reported(kind):
        return daemon.client.incidents(run=RUN, kind=kind)

    def steps():
        return min(values("hookd_steps_total"))

    wait_until(lambda: steps() >= 300, what="300 healthy steps")
    for family in ("hookd_straggler", "hookd_drift_diverged", "hookd_fingerprint_parted"):
        wait_until(lambda family=family: len(daemon.metrics().select(family, run=RUN)) == 2, what=family)
        assert values(family) == [0, 0]
    assert not reported("straggler") + reported("drift") + reported("parted")

    ranks[1].signal(signal.SIGUSR1)
    ranks[1].expect("slow after step")
    since = steps()
    (slow,) = wait_until(lambda: reported("straggler"), what="the straggler")
    assert (slow["rank"], slow["module"]) == ("1", "second")
    assert slow["step"] - since <= 60, slow
    assert values("hookd_straggler") == [0, 1]
    ranks[1].signal(signal.SIGUSR1)
    wait_until(lambda: reported("straggler_over"), what="its end")

    ranks[0].signal(signal.SIGUSR2)
    ranks[0].expect("flipped after step")
    (drift,) = wait_until(lambda: reported("drift"), what="the drift")
    assert (drift["module"], drift["detail"]["modules"]) == ("second", ["second"])
    assert re.search("rank 1 differs from rank 0 in second; .*it is unknown which are right", drift["message"])
    assert drift["step"] - drift["detail"]["agreed_at_step"] == EVERY
    assert values("hookd_drift_diverged") == [1, 1]
    (parted,) = wait_until(lambda: reported("parted"), what="the end of equal fingerprints")
    assert "rank 1 has parted from rank 0 at step" in parted["message"]
    assert (parted["detail"]["parameter"], parted["step"] - parted["detail"]["agreed_at_step"]) == (
        "second.weight",
        EVERY,
    )
    assert "second.weight" in hookd("diff", *parted["detail"]["files"], "--what", "gradients,update", status=1)
    living = (*(str(one.pid) for one in ranks), "--host", f"unix://{daemon.client.path}", "--what", "gradients,update")
    assert "second.weight" in hookd("diff", *living, status=1)
    assert values("hookd_fingerprint_parted") == [1, 1]
    rows = hookd_json("fingerprint", "--list", "--host", f"unix://{daemon.client.path}")
    assert {(row["rank"], row["path"], row["is_live"]) for row in rows} == {
        (rank, path, True) for rank, path in zip("01", parted["detail"]["files"], strict=True)
    }
    assert re.search(
        "gradients and weights of the steps up to [0-9,]+; step [0-9,]+ differs", daemon.get(f"/run/{RUN}")
    )
    now = steps()
    wait_until(lambda: steps() > now + 2 * EVERY, what="more steps")
    assert len(reported("drift")) == len(reported("straggler")) == len(reported("parted")) == 1
