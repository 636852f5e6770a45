"""Test support for plugin authors: a target and a daemon in the test's process, and checks that every plugin should pass.

    from hookd.testing import assert_bit_identical

    def test_it_counts_the_calls(fake_target):
        fake_target.start(Widths)
        fake_target.run_steps(3)
        fake_target.assert_metrics({'hookd_widths_calls_total{module="0"}': 3})

    def test_it_changes_nothing():
        assert_bit_identical(Widths)

If hookd is installed, pytest finds the fixtures (`hookd.testing.fixtures`) automatically. Importing this package loads
neither torch nor the daemon; using it does. For a guide see docs/testing.md.
"""

from __future__ import annotations

from hookd.testing.cost import assert_overhead_below, overhead
from hookd.testing.daemon import FakeDaemon
from hookd.testing.equality import assert_bit_identical
from hookd.testing.events import Event
from hookd.testing.incidents import Incident, StoredIncident
from hookd.testing.process import SubprocessTarget
from hookd.testing.ranks import FakeRank
from hookd.testing.target import FakeTarget
from hookd.testing.training import Training, many_modules, small, transformer_block
from hookd.testing.values import assert_metrics

__all__ = [
    "Event",
    "FakeDaemon",
    "FakeRank",
    "FakeTarget",
    "Incident",
    "StoredIncident",
    "SubprocessTarget",
    "Training",
    "assert_bit_identical",
    "assert_metrics",
    "assert_overhead_below",
    "many_modules",
    "overhead",
    "small",
    "transformer_block",
]
