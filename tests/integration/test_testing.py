"""hookd.testing: its verdicts on correct and on faulty plugins."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hookd import Plugin, PluginError, Rate, hookimpl
from hookd.api.compatibility import FORMER
from hookd.serving import DaemonPlugin
from hookd.serving import hookimpl as daemon_hookimpl
from hookd.target.plugins import rules
from hookd.target.plugins.global_state import FIRST_CALLS
from hookd.testing import (
    FakeTarget,
    Training,
    assert_bit_identical,
    assert_overhead_below,
    measure,
    small,
)
from hookd.tool.cli import main
from tests.support.watched import is_watched

HERE = str(Path(__file__).parent)


class Widths(Plugin):
    """Counts the calls of each linear layer."""

    name = "widths"

    @hookimpl
    def configure(self, context):
        self.calls = context.counter("calls", "Calls of each linear layer.", ["module"])
        self.batches = context.histogram("batch", "Rows of a batch.", buckets=(1, 4, 16))

    @hookimpl
    def select(self, module):
        return module.type == "Linear"

    @hookimpl
    def forward(self, module, output):
        self.calls.labels(module.name).inc()
        self.batches.observe(len(output))


class Failing(Widths):
    @hookimpl
    def forward(self, module):
        raise KeyError(module.name)


class Behind(DaemonPlugin):
    name = "behind"

    def __init__(self):
        self.lost = []

    @daemon_hookimpl
    def collect(self, ranks, metrics):
        metrics.gauge(
            "steps", "Steps of the slowest rank.", min(rank.value("hookd_steps_total") or 0 for rank in ranks)
        )

    @daemon_hookimpl
    def target_lost(self, target, reason):
        self.lost.append((target.run, reason))


FAILS_AT = Failing.forward.__code__.co_firstlineno + 2


class TestAFakeTarget:
    def test_metrics_are_those_that_prometheus_would_see(self, fake_target):
        fake_target.start(Widths)
        losses = fake_target.run_steps(3)
        assert len(set(losses)) == 3
        fake_target.assert_metrics(
            {
                'hookd_widths_calls_total{module="0"}': 3,
                'hookd_widths_calls_total{module="1"}': None,
                'hookd_widths_batch_bucket{le="4"}': 6,
                'hookd_widths_batch_bucket{le="1"}': 0,
                "hookd_widths_batch_count": 6,
                "hookd_widths_batch_sum": pytest.approx(24),
            }
        )
        assert fake_target.value("hookd_widths_calls_total", "0") == fake_target.value("widths_calls", "0") == 3

    @pytest.mark.parametrize(
        ("key", "value", "words"),
        [
            ('hookd_widths_calls_total{module="0"}', 2, "it is 1.0, not 2"),
            ('hookd_widths_calls_total{module="9"}', 1, 'there are hookd_widths_calls_total{module="0"} 1'),
            ("hookd_width_calls_total", 1, "the nearest names are hookd_widths_calls_total"),
            ("hookd_widths_calls_total", 1, "several series fit"),
            ('hookd_widths_calls_total{module="0"}', None, "there should be none"),
        ],
    )
    def test_what_is_not_as_expected_is_said_with_what_there_is(self, fake_target, key, value, words):
        fake_target.start(Widths)
        fake_target.run_steps(1)
        with pytest.raises(AssertionError) as caught:
            fake_target.assert_metrics({key: value})
        assert words in str(caught.value)

    def test_events_have_what_the_hooks_were_given(self, fake_target):
        fake_target.start(Widths)
        fake_target.run_steps(2)
        calls = fake_target.calls("forward")
        assert [event.module for event in calls] == ["0", "4"] * 2
        assert calls[0].arguments["output"].shape == (4, 16)
        assert {event.hook for event in fake_target.events} == {"configure", "select", "forward"}
        assert len(fake_target.calls("configure")) == 1

    def test_torch_is_as_before_when_it_stops(self):
        with FakeTarget() as target:
            target.start(Widths)
            assert is_watched()
            target.stop()
            assert not is_watched()

    def test_an_error_fails_the_test_with_the_authors_line(self):
        with FakeTarget() as target:
            target.start(Failing)
            target.run_steps(1)
            with pytest.raises(AssertionError, match=rf"test_testing\.py\", line {FAILS_AT}, in forward"):
                target.stop_clean()

    def test_what_an_observer_returns_is_an_error_with_the_authors_line(self):
        class Returning(Widths):
            @hookimpl
            def forward(self, output):
                return output

        with FakeTarget() as target:
            target.start(Returning)
            target.run_steps(1)
            at = f"{__file__}:{Returning.forward.__code__.co_firstlineno}"
            with pytest.raises(AssertionError, match=re.escape(at)):
                target.stop_clean()

    def test_an_error_in_unconfigure_fails_the_test(self):
        class Leaving(Widths):
            @hookimpl
            def unconfigure(self):
                raise ValueError("leak")

        with FakeTarget() as target:
            target.start(Leaving)
            with pytest.raises(AssertionError, match="unconfigure raised ValueError: leak"):
                target.stop_clean()

    def test_a_torch_that_is_not_as_before_fails_the_test(self, monkeypatch):
        monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)  # put back whatever comes

        class Patching(Widths):
            @hookimpl
            def step_post(self):
                was = nn.Module.__call__
                nn.Module.__call__ = lambda *values: was(*values)  # noqa: PLW0108  (a function, to be a method)

        with FakeTarget(record=False) as target:
            target.start(Patching)
            target.run_steps(1)
            with pytest.raises(AssertionError, match=r"nn.Module.__call__ is not as it was before"):
                target.stop_clean()

    def test_options_are_those_of_the_first_plugin(self, fake_target):
        class Optional(Widths):
            name = "optional"

            @hookimpl
            def configure(self, context):
                self.width = context.option("width", 1)
                super().configure(context)

        fake_target.start(Optional, "timing", width=3)
        assert fake_target.plugin("optional").width == 3
        fake_target.configure("optional", width=4)
        assert fake_target.plugin("optional").width == 4
        assert fake_target.state("timing") == "active"


class TestWhatIsRefused:
    """By the agent, with the author's file and line."""

    @pytest.mark.parametrize(
        ("body", "words", "hint"),
        [
            ({"foward": lambda self: None}, "there is no hook 'foward'", "did you mean 'forward'?"),
            ({"forward": lambda self, modul: None}, "forward has no argument 'modul'", "did you mean 'module'?"),
            ({"forward": lambda self, module=None: None}, "gives 'module' a default", "without"),
            ({"forward": lambda self, *modules: None}, "plain names", ""),
        ],
    )
    def test_a_wrong_hook(self, body, words, hint):
        wrong = type("Wrong", (Plugin,), {"name": "wrong", **{name: hookimpl(one) for name, one in body.items()}})
        line = next(iter(body.values())).__code__.co_firstlineno
        with FakeTarget() as target, pytest.raises(PluginError) as caught:
            target.start(wrong)
        assert words in caught.value.message
        assert f"{__file__}:{line}" in caught.value.message
        assert hint in caught.value.hint

    @pytest.mark.parametrize("attribute", ["sampled", "mutating"])
    @pytest.mark.parametrize(
        ("value", "words", "hint"),
        [
            (("forwrd",), "names 'forwrd'", "'forward'"),
            ("root_forward", "must be a tuple", 'Write {} = ("forward",)'),
        ],
    )
    def test_what_should_name_hooks_and_does_not(self, attribute, value, words, hint):
        wrong = type("Wrong", (Plugin,), {"name": "wrong", attribute: value})
        with pytest.raises(PluginError, match=f"wrong: {attribute} .*{words}") as caught:
            rules.check(wrong(), by_name=True)
        assert hint.format(attribute) in caught.value.hint

    @pytest.mark.parametrize("attribute", FORMER)
    @pytest.mark.parametrize("is_late", [False, True])
    def test_an_attribute_that_has_been_replaced(self, attribute, is_late):
        class Old(Plugin):
            name = "old"

            @hookimpl
            def configure(self, context):
                setattr(self, attribute, ("backward",))

        old = Old if is_late else type("Old", (Plugin,), {"name": "old", attribute: ("backward",)})
        with (
            FakeTarget(record=False) as target,
            pytest.raises(PluginError, match=f"attribute {attribute} any") as caught,
        ):
            target.start(old)
        assert caught.value.hint == FORMER[attribute]

    @pytest.mark.parametrize(
        ("sampled", "words"),
        [
            ({"forwrd": Rate()}, "sampled names 'forwrd'"),
            ({"backward": 1000}, "sampled\\['backward'\\] is 1000, but must be a Rate"),
            ({"backward": Rate(longest=1000, stretched_last=True)}, "both longest and stretched_last"),
            ({"backward": Rate(longest=10)}, "longest=10, less than the plugin's 100"),
            ({"backward": Rate(longest=200), "loss": Rate(longest=300)}, "different longest intervals: 200 and 300"),
            ({"forward": Rate(unless_finite=True)}, "unless_finite, which only backward_pre and backward can have"),
        ],
    )
    def test_rates_that_exclude_each_other(self, sampled, words):
        wrong = type("Wrong", (Plugin,), {"name": "wrong", "longest": 100, "sampled": sampled})
        with pytest.raises(PluginError, match=f"wrong: .*{words}") as caught:
            rules.check(wrong(), by_name=True)
        assert caught.value.hint

    def test_a_class_without_a_name(self):
        class Nameless(Plugin):
            pass

        with FakeTarget(record=False) as target, pytest.raises(PluginError, match=rf"it has no name.*{__file__}:\d+"):
            target.start(Nameless)

    def test_a_metric_whose_name_has_total(self):
        class Totals(Plugin):
            name = "totals"

            @hookimpl
            def configure(self, context):
                context.counter("calls_total", "Calls.")

        line = Totals.configure.__code__.co_firstlineno + 2
        with FakeTarget() as target, pytest.raises(PluginError, match=rf"{__file__}:{line}"):
            target.start(Totals)

    def test_a_metric_that_prometheus_would_refuse(self):
        class Dashed(Plugin):
            name = "dashed"

            @hookimpl
            def configure(self, context):
                context.counter("my-calls", "Calls.")

        line = Dashed.configure.__code__.co_firstlineno + 2
        with (
            FakeTarget() as target,
            pytest.raises(PluginError, match=rf"configure raised ValueError.*{__file__}:{line}"),
        ):
            target.start(Dashed)

    def test_another_api(self):
        class Future(Plugin):
            name = "future"
            requires_api = "99.0"

        with FakeTarget() as target, pytest.raises(PluginError, match=r"future needs API 99\.0"):
            target.start(Future)


DRAWING = {
    "configure": lambda draw: lambda self, context: draw() and None,
    "tick": lambda draw: lambda self: draw() and None,
}


class TestBitIdentity:
    def test_an_observer_passes(self):
        assert_bit_identical(Widths)

    def test_an_operation_in_place_is_found(self):
        class Scaling(Widths):
            @hookimpl
            def forward(self, output):
                output.mul_(1.0001)

        with pytest.raises(AssertionError, match="step 1: the loss differs"):
            assert_bit_identical(Scaling)

    def test_a_random_number_is_found(self):
        class Drawing(Widths):
            @hookimpl
            def forward(self, module):
                random.random()

        # The agent sees it in the first calls, unless there is another thread, which might have drawn it by right.
        found = "it changed the random numbers of the training|the state of Python's random numbers differs"
        with pytest.raises(AssertionError, match=found):
            assert_bit_identical(Drawing)

    def test_a_random_number_is_found_that_is_drawn_later(self):
        """The agent itself watches the first calls alone."""

        class Drawing(Widths):
            calls_made = 0

            @hookimpl
            def forward(self, module):
                self.calls_made += 1
                if self.calls_made > 2 * FIRST_CALLS:
                    random.random()

        with pytest.raises(AssertionError, match="the state of Python's random numbers differs"):
            assert_bit_identical(Drawing, steps=2 * FIRST_CALLS)

    @pytest.mark.parametrize("hook", ["configure", "tick"])
    @pytest.mark.parametrize(
        ("draw", "whose"), [(random.random, "Python"), (partial(torch.rand, 1), "torch"), (np.random.rand, "numpy")]
    )
    def test_a_random_number_is_found_that_starting_draws(self, hook, draw, whose):
        drawing = type("Drawing", (Plugin,), {"name": "drawing", hook: hookimpl(DRAWING[hook](draw))})
        with pytest.raises(AssertionError, match=f"starting the plugin has drawn random numbers.*of {whose}'s random"):
            assert_bit_identical(drawing, steps=1)

    def test_numpys_random_numbers_are_compared(self):
        class Drawing(Widths):
            @hookimpl
            def forward(self, module):
                np.random.rand()  # noqa: NPY002

        with pytest.raises(AssertionError, match="step 1: the state of numpy's random numbers differs"):
            assert_bit_identical(Drawing, steps=1)

    def test_what_is_there_with_the_plugin_alone_is_found(self):
        class Adding(Widths):
            @hookimpl
            def forward(self, module):
                torch_module = module.torch()
                if torch_module is not None and "extra" not in dict(torch_module.named_buffers(recurse=False)):
                    torch_module.register_buffer("extra", torch.zeros(1))

        with pytest.raises(AssertionError, match=r"step 1: the weight .*extra differs"):
            assert_bit_identical(Adding, steps=1)

    def test_a_training_that_differs_from_itself_is_reported(self):
        number = itertools.count()

        def make():
            training = small()
            return Training(training.model, training.batch, lambda output: output.square().mean() + next(number))

        with pytest.raises(AssertionError, match="differs from itself"):
            assert_bit_identical(Widths, make=make)

    def test_the_random_numbers_of_the_test_go_on_as_they_were(self):
        def drawn() -> tuple[float, ...]:
            return torch.rand(1).item(), random.random(), np.random.rand()  # noqa: NPY002

        states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
        expected = drawn()
        for put_back, state in zip((torch.set_rng_state, random.setstate, np.random.set_state), states, strict=True):
            put_back(state)
        assert_bit_identical(Widths, steps=1)
        assert drawn() == expected


class TestOverhead:
    def test_what_costs_little_passes_and_what_costs_much_does_not(self):
        class Busy(Widths):
            @hookimpl
            def step_post(self):
                sum(range(1_000_000))  # many times what a step of so small a model takes

        assert_overhead_below(20.0, Widths, make=small, pairs=12, steps=4)
        with pytest.raises(AssertionError, match=r"a step takes .* times .* and may take 2.0"):
            assert_overhead_below(2.0, Busy, make=small, pairs=12, steps=1)


class TestMeasure:
    """The measurements behind `hookd plugin check` and `bench`."""

    def test_it_tells_costs_metrics_and_that_nothing_changes(self):
        reported = measure.check(Widths, HERE, {})
        assert reported["difference"] == ""
        assert reported["raised"] == []
        assert reported["hooks"]["forward"]["calls"] >= 4 * measure.STEPS - 2
        assert (
            reported["hooks"]["forward"]["low_ns"]
            <= reported["hooks"]["forward"]["ns"]
            <= reported["hooks"]["forward"]["high_ns"]
        )
        assert [(one["name"], one["labels"]) for one in reported["metrics"][:2]] == [
            ("hookd_widths_calls", ["module"]),
            ("hookd_widths_batch", []),
        ]
        assert reported["metrics"][0]["line"] == Widths.configure.__code__.co_firstlineno + 2

    def test_it_tells_what_the_training_raises_with_it(self):
        class Scaling(Widths):
            name = "scaling"

            @hookimpl
            def select(self, module):
                return True

            @hookimpl
            def forward(self, output):
                output.mul_(1.1)

        assert "modified by an inplace operation" in measure.check(Scaling, HERE, {})["broken"]

    def test_it_tells_where_a_hook_raises(self):
        (raised,) = measure.check(Failing, HERE, {})["raised"]
        assert (raised["file"], raised["line"], raised["hook"]) == (__file__, FAILS_AT, "forward")
        assert raised["error"] == "KeyError: '0'"

    def test_bench_has_figures_for_each_hook_and_a_control(self, monkeypatch):
        monkeypatch.setattr(measure, "MODELS", {"small": small})
        monkeypatch.setattr(measure, "BENCH_PAIRS", 12)
        reported = measure.bench(Widths, HERE, {})["models"]["small"]
        assert reported["hooks"]["forward"]["peak_bytes"] >= 0
        for one in (reported["ratio"], reported["control"]):
            assert 0 < one["low"] <= one["median"] <= one["high"]


@pytest.mark.load
def test_the_packages_that_new_writes_pass_their_own_tests_and_the_check(tmp_path, capsys, monkeypatch):
    for words in (["width"], ["spread", "--daemon"]):  # test_stopwatch.py checks one of the first kind
        assert main(["plugin", "new", *words, "--dir", str(tmp_path)]) == 0
    width, spread = tmp_path / "hookd-width", tmp_path / "hookd-spread"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "hookd.testing.fixtures", "tests",
             width / "tests", "-k", "not (test_width and cost)"]  # fmt: skip
    path = os.pathsep.join(filter(None, (str(width), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(words, cwd=spread, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert "12 passed, 1 deselected" in done.stdout, done.stdout + done.stderr

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # mypy's
    capsys.readouterr()
    assert main(["plugin", "check", str(spread), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)["plugins"]
    assert {one["side"]: (one["is_run"], one["problems"]) for one in output} == dict.fromkeys(
        ("target", "daemon"), (True, [])
    )


def test_a_daemon_reads_the_training_in_this_process(fake_target, fake_daemon):
    fake_target.start(Widths)
    fake_daemon.start(Behind)
    fake_daemon.attach(fake_target)
    (rank,) = fake_daemon.ranks()
    fake_target.run_steps(3)
    fake_daemon.look()
    fake_daemon.assert_metrics(
        {
            'hookd_behind_steps{run="test"}': 3,
            f'hookd_behind_steps{{run="{rank.run}"}}': 0,
            'hookd_widths_calls_total{run="test",module="0"}': 3,
        }
    )
    fake_target.stop()
    fake_daemon.look()
    assert fake_daemon.plugin("behind").lost == [("test", "detached")]


def test_loading_the_fixtures_loads_no_torch():
    code = "import sys, hookd.testing, hookd.testing.fixtures, hookd.testing.measure; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
