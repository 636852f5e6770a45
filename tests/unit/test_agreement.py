"""Ranks and tool agree about one change: whoever comes first decides, for all and for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookd.wire.agreement import Agreement, boundary_ahead, disagreement


@pytest.fixture
def agreement():
    one = Agreement.create(2)
    yield one
    one.close()


@pytest.mark.parametrize("commits", [True, False])
def test_the_first_decision_stands(agreement, commits):
    assert agreement.decide(commit=commits) is commits
    assert agreement.decide(commit=not commits) is commits


def test_another_process_sees_the_decision(agreement):
    script = "import sys; from hookd.wire.agreement import Agreement; from hookd.wire.descriptors import Descriptor; print(Agreement(Descriptor(int(sys.argv[1]))).decide(commit=False))"
    agreement.decide(commit=True)
    command = [sys.executable, "-c", script, str(agreement.fd)]
    done = subprocess.run(command, pass_fds=[agreement.fd], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"


def test_of_many_that_decide_at_once_all_see_the_same():
    for _ in range(200):
        one, seen = Agreement.create(2), []
        barrier = threading.Barrier(2)

        def decide(*, commit, one=one, seen=seen, barrier=barrier):
            barrier.wait()
            seen.append(one.decide(commit=commit))

        threads = [threading.Thread(target=decide, kwargs={"commit": commit}) for commit in (True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        one.close()
        assert seen in ([True, True], [False, False])


def test_the_earliest_end_counts(agreement):
    agreement.decide(commit=True)
    assert agreement.ended() is None
    agreement.end(1, 70)
    assert agreement.ended() == (70, 1)
    agreement.end(0, 60)
    assert agreement.ended() == (60, 0)


def test_closing_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    one = Agreement.create(2)
    one.close()
    one.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        ([[4, 7, 8], [4, 7, 8]], ""),
        ([[4, 7, 8, 10], [7, 8]], ""),
        ([[4, 7, 8], [7, 8, 10, 12]], ""),
        ([[4, 4, 7, 7], [4, 7, 7, 9, 9]], ""),  # two optimizers that step without a collective between them
        ([[4, 7, 8], []], "has not taken two steps"),
        ([[4, 4, 4], [4, 4, 4]], "has not taken two steps"),
        ([[4, 7, 8], [4, 6, 8]], "same collectives"),
        ([[4, 7, 8], [8, 9, 10]], "too far apart"),
        ([[4, 7, 8], [9, 10, 11]], "too far apart"),
    ],
)
def test_ranks_must_have_steps_in_common(marks, words):
    assert words in disagreement(marks)
    assert bool(disagreement(marks)) is bool(words)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.lists(st.integers(1, 50), min_size=1), st.floats(0, 1e4)), min_size=1),
    st.floats(0, 100),
)
def test_a_boundary_is_ahead_of_every_rank_by_three_steps_and_the_margin(ranks, margin_s):
    made = []
    for first, lengths, span_s in ranks:
        marks = [first]
        for length in lengths:
            marks.append(marks[-1] + length)
        made.append((marks, span_s))
    at = boundary_ahead(made, margin_s)
    for marks, span_s in made:
        per_step = (marks[-1] - marks[0]) / (len(marks) - 1)
        assert at >= marks[-1] + 3 * per_step
        assert (at - marks[-1]) / per_step * (max(span_s, 1e-6) / (len(marks) - 1)) >= margin_s * (1 - 1e-9)
