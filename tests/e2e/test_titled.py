"""Processes that have written a title over their environment: what it asks for is heeded all the same."""

from __future__ import annotations

import contextlib
import sysconfig
from typing import TYPE_CHECKING

import pytest

from hookd.attach import AttachRequest, attach, detach, discover, environment
from hookd.config.rules import ASKED_FOR, decide
from hookd.daemon.wanted import traits
from hookd.errors import TargetUnsupported
from tests.support import training
from tests.support.training import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.processes import Process

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]

REQUEST = AttachRequest(plugins=(), lease_s=None, timeout_s=60)


@contextlib.contextmanager
def titled(*more: str, **variables: str) -> Iterator[Process]:
    job = Job("titled.py", f"--libraries {sysconfig.get_path('purelib')}")
    with training.start(job, *more, **variables) as process:
        process.expect("^ready$")
        yield process
        process.popen.terminate()
        process.finish()
        assert process.err == []


@pytest.mark.parametrize("title", ["ray::train", "a=b" * 3000])
def test_who_asks_for_hookd_or_wants_none_is_heard(title):
    with titled("--title", title, HOOKD="1", RANK="3") as process:
        found = environment.of(process.pid)
        assert found is not None
        assert (found["HOOKD"], found["RANK"], found["OMP_NUM_THREADS"]) == ("1", "3", "1")
        one = discover.inspect(process.pid)
        assert one is not None
        seen = traits(one)
        assert seen is not None
        assert decide((), seen) == ASKED_FOR
        attach(process.pid, REQUEST)
        assert detach(process.pid)["restored"] == "identity"


@pytest.mark.parametrize("hides", ["0", "1"])
def test_an_opt_out_is_heeded_also_where_the_process_alone_knows_of_it(hides):
    with titled("--hides", hides, HOOKD_DISABLE="1") as process:
        assert discover.is_disabled(process.pid) == (hides == "0")
        with pytest.raises(TargetUnsupported) as caught:
            attach(process.pid, REQUEST)
        assert caught.value.reason == "disabled"
        assert not discover.holds_page(process.pid)
