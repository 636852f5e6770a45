"""The heat map of ranks, asked of a real Prometheus with the series of up to 1,024 ranks in it."""

from __future__ import annotations

import time

import pytest

from tests.support import prometheus
from tests.support.dashboards import chosen, every_query
from tests.support.deployment import run

MINUTES = 5
STEP_S = 15


@pytest.fixture
def server(stack, tmp_path):
    """Return a function that starts a Prometheus with steps of ranks: each takes 0.1 s, those of slow ranks 0.2 s."""
    if not prometheus.is_there():
        pytest.skip("Prometheus is not installed here (Debian: apt install prometheus)")
    now = int(time.time())

    def start(count, slow):
        ticks = range(0, MINUTES * 60, STEP_S)
        steps = [f'hookd_steps_total{{run="a-run",rank="{rank}"}} {tick} {now - MINUTES * 60 + tick}'
                 for rank in range(count) for tick in ticks]  # fmt: skip
        seconds = [f'hookd_timing_phase_seconds_total{{run="a-run",rank="{rank}",phase="forward"}} '
                   f'{tick * (0.2 if rank in slow else 0.1)} {now - MINUTES * 60 + tick}'
                   for rank in range(count) for tick in ticks]  # fmt: skip
        (tmp_path / "series").write_text("\n".join([*steps, *seconds, "# EOF\n"]))
        code, output = run(
            "promtool", "tsdb", "create-blocks-from", "openmetrics", tmp_path / "series", tmp_path / "data"
        )
        assert code == 0, output
        return prometheus.started(stack, tmp_path, "http://", "global: {}\n")

    def asked(found, panel):
        (expr,) = [one.expr for one in every_query() if (one.dashboard, one.panel) == ("hookd-ranks", panel)]
        return found.labels(chosen(expr), now - 120, now - 60, STEP_S)

    return start, asked


@pytest.mark.parametrize("count", [8, 64])
def test_every_rank_of_a_small_run_has_a_row_in_the_order_of_numbers(server, count):
    start, asked = server
    assert [int(row["rank"]) for row in asked(start(count, {3}), "Slow ranks")] == list(range(count))


def test_of_1024_ranks_the_64_slowest_have_a_row_and_all_are_counted(server):
    start, asked = server
    slow = set(range(5, 1024, 16))
    found = start(1024, slow)
    assert [int(row["rank"]) for row in asked(found, "Slow ranks")] == sorted(slow)
    assert {row["score"] for row in asked(found, "How many ranks are slow")} == {"1", "2"}
