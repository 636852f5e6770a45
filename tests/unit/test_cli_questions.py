"""The output of `hookd stack`, `snapshot` and `eval` for answers, including implausible ones."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from hookd.errors import ConfigError, ControlError, HookdError, PermissionDenied
from hookd.tool import config
from hookd.tool.attach import py_spy
from hookd.tool.attach.modules import _checked, totals
from hookd.tool.attach.stack import _joined, _path
from hookd.tool.cli import eval as evaluating
from hookd.tool.cli import snapshot, stack
from hookd.tool.daemon.evaluate import _read, require_allowed
from hookd.tool.linux.owner import user_name

ESCAPE = "\x1b[31m"


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def module(name, **more):
    row = {"name": name, "class": "Linear", "home": "torch", "seen": "observed", "training": True, "wrapped": False,
           "plugins": ["nan"], "parameters": [], "buffers": [], "hooks": [], "left_out": 0}  # fmt: skip
    return {**row, **more}


def tensor(name, elements=4, **more):
    row = {"name": name, "dtype": "float32", "device": "cpu", "requires_grad": True, "shape": [elements],
           "elements": elements, "bytes": 4 * elements}  # fmt: skip
    return {**row, **more}


def test_a_snapshot_fits_80_columns_and_obeys_no_escape():
    deep = ".".join(["block_with_a_long_name"] * 20)
    rows = [
        module("(root)", **{"class": "Net" + ESCAPE}),
        module(deep, parameters=[tensor("weight" * 30), tensor("b", same_as="(root)" + ESCAPE)]),
        module("x", plugins=["other"] * 30, hooks=[{"kind": "forward", "function": "m:f" * 50, "count": 2}]),
    ]
    lines = [line for row in rows for line in snapshot._module(row, ("nan",))]
    assert max(map(len, lines)) <= 80
    assert all(line.isprintable() for line in lines)
    assert "observed" in lines[0]
    assert "nan" not in lines[0], "what is usual is said once, below"


def test_totals_count_what_is_shared_once():
    rows = [
        module("(root)", buffers=[tensor("mean", 2, requires_grad=False)]),
        module("a", parameters=[tensor("weight", 8), tensor("frozen", 3, requires_grad=False)]),
        module("b", parameters=[{"name": "weight", "same_as": "a.weight"}, {"name": "lazy", "uninitialized": True}]),
        module("c", parameters=[tensor("half", 5, dtype="float16", bytes=10, device="cuda:0")]),
    ]
    found = totals(rows)
    assert (found["modules"], found["parameters"], found["trainable"], found["buffers"]) == (4, 16, 13, 2)
    assert (found["bytes"], found["unknown"]) == (4 * 13 + 10, 1)
    assert {(one["device"], one["kind"]): one["bytes"] for one in found["by"]} == {
        ("cpu", "buffers"): 8, ("cpu", "parameters"): 44, ("cuda:0", "parameters"): 10,
    }  # fmt: skip


@pytest.mark.parametrize(
    "rows",
    [None, [], [1], [module(1)], [module("a", parameters=None)], [module("a", hooks=[1])],
     [module("a", parameters=[tensor("w", -1)])], [module("a", buffers=[tensor("w", bytes=True)])]],
)  # fmt: skip
def test_an_agent_that_says_something_else_is_refused(rows):
    with pytest.raises(ControlError) as caught:
        list(_checked({"modules": rows}, 1))
    assert caught.value.reason == "protocol"


def test_the_modules_above_are_those_that_there_are():
    known = {"(root)", "blocks", "blocks.1.attn", "#2.(root)", "#2.a"}
    assert _path("blocks.1.attn", known) == ["(root)", "blocks", "blocks.1.attn"]
    assert _path("(root)", known) == ["(root)"]
    assert _path("#2.a.b", known) == ["#2.(root)", "#2.a", "#2.a.b"]


def test_a_thread_is_shown_with_its_modules_and_without_hookds_frames():
    frames = [
        {"function": "forward" + ESCAPE, "file": "/long/" * 40 + "model.py", "line": 7, "own": False, "native": False},
        {"function": "plan", "file": "<hookd plan>", "line": 1, "own": True, "native": False},
    ]
    beat = {"phase": "forward", "module": "a", "type": "Linear", "modules": ["(root)", "a"], "step": 5, "moves": False}
    found = {
        "pid": 9, "identity": {"script": "train.py", "run": "r", "rank": 0}, "state": "stopped", "last_step_s": 12.0,
        "silent_s": 11.0, "watched_s": 0.5,
        "ways": {"page": {"by": "heartbeats", "problem": "", "seconds": None},
                 "python": {"by": None, "problem": "why " * 30, "seconds": 2.0}},
        "threads": [{"tid": 9, "name": "MainThread", "beat": beat, "frames": frames, "left_out": 3,
                     "kernel": {"state": "stopped", "where": "do_signal_stop"}}],
    }  # fmt: skip
    lines = list(stack._lines(found))
    text = "\n".join(lines)
    assert max(map(len, text.splitlines())) <= 80
    assert ESCAPE not in text
    assert "stopped" in lines[0]
    assert "forward of a (Linear), step 5, no event within 0.5 s" in text
    assert "modules: (root) > a" in text
    assert "model.py:7" in text
    assert "plan" not in text.replace("(3 more and 1 of hookd left out)", "")


def test_a_stack_and_a_heartbeat_of_one_thread_are_one_row():
    stacks = [{"tid": 10**7, "name": "helper", "frames": [{"own": False}], "left_out": 0}]
    rows = _joined(10**7, {10**7: {"phase": "other"}}, {10**7: "MainThread"}, stacks)
    assert [(row["tid"], row["name"], row["beat"], row["kernel"]) for row in rows] == [
        (10**7, "helper", {"phase": "other"}, None)
    ]


def test_a_forked_childs_main_thread_is_known_though_it_has_its_parents_number():
    pid = os.getpid()
    stacks = [{"tid": 10**7, "name": "MainThread", "frames": [{"own": False}], "left_out": 0}]
    (row,) = _joined(pid, {pid: {"phase": "other"}}, {pid: "MainThread"}, stacks)
    assert (row["tid"], row["beat"], row["frames"]) == (pid, {"phase": "other"}, [{"own": False}])


def test_evaluating_is_off_unless_the_configuration_says_otherwise(caplog, tmp_path):
    assert not config.load({}, {}).eval_allow
    assert config.load({}, {"HOOKD_EVAL_ALLOW": "1"}).eval_allow
    path = tmp_path / "hookd.toml"
    path.write_text("[eval]\nallow = true\n")
    assert config.check(path).eval_allow
    path.write_text("[eval]\nallow = 'perhaps'\n")
    with pytest.raises(ConfigError, match=r"\[eval\] allow"):
        config.check(path)
    caplog.set_level(logging.WARNING)
    by = {"uid": 1000, "pid": 5}
    for allowed, is_embedded in ((False, False), (True, True)):
        with pytest.raises(PermissionDenied) as caught:
            require_allowed(3, by, allowed=allowed, is_embedded=is_embedded)
        assert caught.value.reason == "eval-not-allowed"
        assert "[eval] allow = true" in caught.value.hint
    require_allowed(3, by, allowed=True, is_embedded=False)
    assert [record.getMessage() for record in caplog.records] == [
        f"eval in process 3 refused, for user {user_name(1000)} (process 5)"
    ] * 2


def test_what_became_of_an_expression_is_read_with_care():
    assert _read({"state": "?", "seconds": "x", "frames": 3}) == {"state": "running", "seconds": 0.0, "frames": []}
    assert _read({"state": "done", "result": 5, "value": [1], "type": None})["result"] == "5"
    assert "value" not in _read({"state": "done", "value": [1]})
    assert "--timeout" in evaluating._failure({"state": "interrupted", "seconds": 5.0})


def test_py_spy_tells_where_a_process_is_that_holds_its_interpreter():
    if py_spy.program() is None:
        pytest.skip("py-spy is not installed")
    code = "import ctypes\ndef holds():\n    print('x', flush=True)\n    ctypes.PyDLL(None).pause()\nholds()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout.readline()
            (thread,) = py_spy.dump(child.pid)
        finally:
            child.kill()
    assert [frame["function"] for frame in thread["frames"] if not frame["native"]] == ["holds", "<module>"]


def test_without_py_spy_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(py_spy, "program", lambda: None)
    with pytest.raises(HookdError) as caught:
        py_spy.dump(1)
    assert (caught.value.reason, "hookd[stack]" in caught.value.hint) == ("no-py-spy", True)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1000, "1 k"), (10**6, "1 M"), (10**9, "1 G"), (10**12, "1 T"), (12_345_678, "12.3 M"), (None, "?")],
)  # fmt: skip
def test_a_number_of_elements_has_the_largest_unit_that_fits(value, text):
    assert snapshot.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 10, "1 KiB"), (1 << 20, "1 MiB"), (1 << 30, "1 GiB"), (1 << 40, "1 TiB")]
)  # fmt: skip
def test_a_number_of_bytes_has_the_largest_unit_that_fits(value, text):
    assert snapshot.size(value) == text
