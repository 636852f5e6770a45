"""hookd's tests that need a GPU."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from tests.gpu.place import ROOT, Table

if TYPE_CHECKING:
    from tests.gpu.place import Place

FILES = (
    "tests/integration/test_agent_numeric_gpu.py", "tests/integration/test_agent_later.py", "tests/integration/test_device_kernel.py",
    "tests/plugins/test_nan_cuda.py",
    "tests/plugins/test_timing_device.py", "tests/plugins/test_timing_spans.py", "tests/plugins/test_drift_device.py",
    "tests/plugins/test_memory.py", "tests/plugins/test_fingerprint.py", "tests/integration/test_fingerprint_device.py",
)  # fmt: skip
LIMIT_S = 400.0
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


def part(place: Place) -> Table:
    """Run the tests file by file; without a GPU, those that need one are skipped."""
    table = Table(
        "Tests",
        "The tests of what a device does; those that need a GPU are skipped without one.",
        ("file", "passed", "skipped", "failed"),
    )
    for file in FILES:
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not load", str(ROOT / file)]
        found = place.run(words, LIMIT_S)
        counts = {what: int(count) for count, what in _COUNT.findall(found.stdout)}
        failed = counts.get("failed", 0) + counts.get("error", 0)
        table.rows.append([file, str(counts.get("passed", 0)), str(counts.get("skipped", 0)), str(failed)])
        table.figures[file] = counts
        if found.returncode not in (0, 5) or failed:
            table.failures.append(f"{file}: {(found.stdout + found.stderr)[-800:]}")
    return table
