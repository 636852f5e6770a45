"""Over torch's own zoo of modules all observers together change nothing, and find nothing where all is finite.

`tests/targets/zoo.py` prints a line for each case. It runs once plainly, once observed with all cases that stay finite,
and once with those that make a NaN or an infinity by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import tool, training
from tests.support.environment import TARGETS, bare_python
from tests.support.processes import Process
from tests.support.tool import Page, plugin_options

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

OBSERVERS = plugin_options(["nan:every=1", "timing:every=1", "activations:every=1"])
ALL_DTYPES = "float32 float64 float16 bfloat16 complex32 complex64 complex128".split()
LONG_S = 1500
Cases = dict[str, str]


@pytest.mark.load
def test_every_module_of_torch_is_bit_identical_under_all_observers(tmp_path):
    assert_identical(tmp_path, ["--most", "10"])


@pytest.mark.load
@pytest.mark.timeout(3 * LONG_S)
def test_every_case_of_torchs_modules_in_every_dtype_is_bit_identical_under_all_observers(tmp_path):
    assert_identical(tmp_path, ["--dtypes", *ALL_DTYPES])


def assert_identical(directory: Path, arguments: list[str]) -> None:
    with Process(command(arguments), env=training.environment()) as process:
        plain = cases(process.finish(LONG_S))
    assert len({name.split("/")[0] for name in plain}) > 100, "torch's database has more modules than that"
    bad = {name for name, result in plain.items() if result.startswith("nonfinite")}
    good, alarms = observed(directory / "good", arguments, plain.keys() - bad)
    assert different(plain, good) == []
    assert alarms == [], "nothing was wrong"
    broken, incidents = observed(directory / "bad", arguments, bad)
    assert different(plain, broken) == []
    assert good.keys() | broken.keys() == plain.keys()
    assert incidents, "nan was not looking"


def observed(names: Path, arguments: list[str], only: Collection[str]) -> tuple[Cases, list[dict[str, object]]]:
    """Run some cases under all observers, none of which may fail; return the results and the incidents."""
    names.write_text("\n".join(only))
    program = command([*arguments, "--only", str(names)])
    with tool.run(*OBSERVERS, program=program) as process, Page.below(process) as page:
        results = cases(process.finish(LONG_S))
        values = page.values()
        assert set(values["hookd_plugin_errors"].values()) == {0}, [entry["message"] for entry in page.read().logs]
        assert {state for (_, state), on in values["hookd_plugin_state"].items() if on} == {"active"}
        twice = sum("/eval/" in name and "finite" in result for name, result in results.items())
        assert sum(beat.events for beat in page.read().heartbeats) >= len(results) + twice, "not every call was seen"
        return results, page.read().incidents


def command(arguments: list[str]) -> list[str | Path]:
    return [bare_python(), TARGETS / "zoo.py", *arguments]


def cases(lines: list[str]) -> Cases:
    """Return what each case left, by its name."""
    return dict(line.split(" ", 1) for line in lines)


def different(plain: Cases, results: Cases) -> list[str]:
    return [f"{name}: {plain[name]} is now {result}" for name, result in results.items() if plain[name] != result]
