"""Every version and build of CPython as a target. `make compat` adds every version as a tool, see `test_tools.py`.

An interpreter without a torch gets a stub package of that name, enough for an injection and not for an agent: the tests
that say so in their names prove the injection and nothing more.
"""

from __future__ import annotations

import itertools

import pytest

from tests.compat.trainings import assert_nothing_is_left, training_on
from tests.support import interpreters, stub
from tests.support.processes import wait_until
from tests.support.tool import Attachment

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable"), pytest.mark.timeout(300)]

BUSY = """
values = [i * 0.37 for i in range(300)]
wanted = sum(v * v / 3.1 for v in values)
def step():
    assert sum(v * v / 3.1 for v in values) == wanted
until_told(step)
"""
BUILDS = [pytest.param(*one, id=f"{one[0][0]}.{one[0][1]}-{one[1]}")
          for one in itertools.product(interpreters.VERSIONS, ("shared", "static"))]  # fmt: skip


@pytest.mark.parametrize(("minor", "build"), BUILDS)
def test_an_injection_with_a_stub_for_torch(minor, build):
    pythons = [one for one in interpreters.found() if one.minor == minor and one.is_shared == (build == "shared")]
    if not pythons:
        pytest.skip(
            f"no CPython {minor[0]}.{minor[1]} with a {build} libpython here; HOOKD_COMPAT_PYTHONS can name one"
        )
    for python in pythons:
        with python.directory() as directory, stub.start(directory, BUSY, python) as target:
            threads = stub.threads(target.pid)
            for _ in range(5):
                stub.inject(target.pid)
            wait_until(lambda: stub.threads(target.pid) == threads, what="the threads end")  # noqa: B023
            assert stub.mailboxes(target.pid) == 0
            stub.finish(target)


@pytest.mark.parametrize(
    "where", [pytest.param("here", marks=pytest.mark.compat), *(interpreters.roots() or [interpreters.no_roots()])]
)
def test_a_training_is_watched_and_ends_as_if_nobody_had_been_there(where):
    python = interpreters.with_torch(where)
    with training_on(python) as training:
        plain = training.checksum()
        with training.start("--pause", "0.01") as target:
            target.expect("^step 20 ")
            with Attachment([target.pid], "-p", "nan", "-p", "timing", "-p", "activations") as attachment:
                wait_until(lambda: attachment.metrics().total("hookd_steps_total") > 3, what="steps are counted")
                metrics = attachment.metrics()
                assert metrics.labels("hookd_timing_forward_seconds_total", "module") >= {"0", "1", "2"}
                assert metrics.labels("hookd_target_info", "python") == {".".join(map(str, python.version))}
                assert metrics.labels("hookd_target_info", "torch") == {python.torch}
                assert metrics.total("hookd_attach_pause_seconds_count") == 1
                # Without a stop from 3.14 on.
                assert (metrics.total("hookd_attach_pause_seconds_sum") == 0) == (python.minor >= (3, 14))
                attachment.detach()
            assert_nothing_is_left(target.pid)
            assert target.finish()[-1] == plain
