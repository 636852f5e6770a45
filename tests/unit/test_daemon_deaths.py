"""The words for an end: what each rung of the ladder tells, and nothing that nobody tells."""

from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace

import pytest

from hookd.tool.daemon.fleet.deaths import LAST, Evidence, EvidenceReader, judge
from hookd.tool.linux import oom, proc
from hookd.wire.page import CALL_RECORD, MODULE, PHASE, PHASE_RECORD, PHASES, STEP, STEP_RECORD, PageReader, PageWriter

BROKEN = {"type": "RuntimeError", "message": "no \x1b[2Jroom\nmore", "where": "train.py:7 in main", "module": "fc1"}


@pytest.fixture
def page():
    writer = PageWriter.create({"pid": os.getpid(), "step_offset": 100})
    writer.set_state("running")
    yield writer
    writer.close()


def death(page, status=None, source="", **more):
    reader = PageReader(os.dup(page.fd))
    try:
        found = judge(Evidence(status, source, **more), reader.read(), reader.recent(LAST))
    finally:
        reader.close()
    json.dumps(dict(found.fields), allow_nan=False)
    return found


def beat(page, module, phase):
    base = page.thread(os.getpid(), "MainThread")
    page.cells[base + MODULE] = module
    page.cells[base + PHASE] = PHASES.index(phase)
    page.cells[base + STEP] = 103


def test_nothing_is_guessed_where_nobody_tells(page):
    assert (death(page).reason, death(page).is_incident) == ("unknown", True)
    page.set_state("exited")
    found = death(page)
    assert (found.reason, found.is_incident, found.fields["known_from"]) == ("exited", False, "page")
    assert "exit_code" not in found.fields
    assert "its exit code is not known" in found.message


def test_pythons_own_exit_with_an_exception_is_an_incident_also_where_the_code_is_not_known(page):
    page.update_identity(exception=BROKEN)
    page.set_state("exited")
    found = death(page)
    assert (found.reason, found.is_incident) == ("exited", True)
    assert "after RuntimeError: no  [2Jroom (module fc1, train.py:7 in main)" in found.message
    assert death(page, 1 << 8, "zombie").message.startswith("ended with exit code 1 after RuntimeError: no")


def test_an_exception_is_no_cause_of_a_good_end_and_a_foreign_one_is_none(page):
    page.update_identity(exception=BROKEN)
    page.set_state("exited")
    found = death(page, 0, "pidfd")
    assert (found.reason, found.is_incident, "exception" in found.fields) == ("exited", False, False)
    page.update_identity(exception={"type": 7, "message": []})
    assert death(page, 1 << 8, "pidfd").message == "ended with exit code 1"


def test_a_plain_kill_is_not_one_for_want_of_memory_and_that_says_who_knows(page):
    plain = death(page, signal.SIGKILL, "pidfd")
    assert (plain.reason, plain.message) == ("signal SIGKILL", "was killed by SIGKILL (Killed)")
    assert "counts the kill" in death(page, signal.SIGKILL, "pidfd", oom="cgroup").message
    named = death(page, signal.SIGKILL, "pidfd", oom="kernel log")
    assert (named.reason, named.fields["oom"]) == ("oom", "kernel log")
    assert "its container has ended" in death(page, signal.SIGKILL, "pidfd", container_ended=True).message


def test_a_signal_is_named_with_its_core_dump_and_one_without_a_name_by_its_number(page):
    assert "core dumped" in death(page, signal.SIGSEGV | 0x80, "pidfd").message
    assert death(page, 40, "pidfd").reason == "signal 40"
    page.set_state("exited")
    assert death(page, signal.SIGSEGV, "pidfd").message.endswith("during Python's own exit")


def test_where_it_was_last_is_reported_with_step_module_phase_and_the_last_events(page):
    module = page.module("layers.2.fc", "Linear", 1)
    beat(page, module, "forward")
    for step in range(100):
        page.record(STEP_RECORD, 0, step, 0.5)
    page.record(PHASE_RECORD, 0, 101, PHASES.index("forward"))
    page.record(CALL_RECORD, module, 101)
    page.record(CALL_RECORD, 999, 101)
    page.record(PHASE_RECORD, 0, 101, 1e9)
    page.record(77, 0, 101, 5.0)
    index = page.series(page.family("hookd_activations_mean", "gauge", "Help.", ("module",)), ("layers.2.fc",))
    page.cells[index] = 0.25
    found = death(page, signal.SIGSEGV, "pidfd")
    assert found.message.endswith("; last in forward of layers.2.fc")
    fields = found.fields
    assert (fields["step"], fields["is_step_absolute"], fields["module"], fields["phase"]) == (
        101,
        True,
        "layers.2.fc",
        "forward",
    )
    assert len(fields["events"]) == LAST
    assert [one["step"] for one in fields["events"] if one["event"] == "step"][-1] == 199, "as the incident counts"
    assert [(one["event"], one.get("module")) for one in fields["events"][-5:]] == [
        ("forward", None), ("call", "layers.2.fc"), ("call", None), ("other", None), ("kind 77", None)
    ]  # fmt: skip
    assert fields["statistics"]["modules"][0]["metrics"] == {"activations": {"mean": 0.25}}


def test_a_page_full_of_text_makes_no_large_incident(page):
    for family in range(64):
        number = page.family(f"hookd_x{family}_y", "gauge", "Help.", ("label",))
        for n in range(64):
            page.series(number, ("long" * 250 + str(n),))
    assert len(json.dumps(dict(death(page, 1, "pidfd").fields))) < 100_000


def test_one_whose_page_never_was_good_is_classified_by_the_kernel_alone():
    found = judge(Evidence(3 << 8, "zombie"), None)
    assert (found.reason, dict(found.fields)) == (
        "exit 3",
        {"reason": "exit 3", "known_from": "zombie", "exit_code": 3},
    )


def test_a_kill_that_the_log_tells_of_is_left_in_no_cgroup_for_the_next_to_die(monkeypatch):
    kills = [True]
    reader = EvidenceReader(os.getpid(), proc.start_ticks(os.getpid()))
    reader.memory = SimpleNamespace(take=lambda: bool(kills) and kills.pop())
    monkeypatch.setattr(oom, "killed", lambda _since_s: [os.getpid()])
    assert reader._oom() == "kernel log"
    monkeypatch.setattr(oom, "killed", lambda _since_s: None)
    assert reader._oom() == "", "there was one kill"
