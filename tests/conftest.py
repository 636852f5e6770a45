"""Rules for all tests: nothing of ours stays installed, and tests of whole processes are marked as such."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import emulated, own_pids, post_mortem

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

pytest_plugins = ["hookd.testing.fixtures"]
"""Named here too: an environment may have been made before there was such an entry point."""

# Several workers share a processor: OpenMP's threads wait for each other by computing, which took 8 times as long. Here, for
# tests/plugins/conftest.py may load torch before `pytest_configure`.
os.environ.setdefault("OMP_NUM_THREADS", "1")
E2E = Path(__file__).parent / "e2e"
MARK = "HOOKDS_TESTS"
"""Without a PID namespace of its own, the environment variable by which a worker's tests know their processes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", choices=("without", "only"), help="leave out the tests marked `alone`, or all others")


NUMBER = pytest.StashKey[int]()
_numbers = itertools.count()


def pytest_itemcollected(item: pytest.Item) -> None:
    item.stash[NUMBER] = next(_numbers)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    stories: dict[Path, list[int]] = {}
    for index, item in enumerate(items):
        if item.path.is_relative_to(E2E):
            item.add_marker(pytest.mark.e2e)
        if item.get_closest_marker("story"):
            stories.setdefault(item.path, []).append(index)
    for places in stories.values():  # pytest-randomly has shuffled them
        reported = sorted((items[index] for index in places), key=lambda item: item.stash[NUMBER])
        for index, item in zip(places, reported, strict=True):
            items[index] = item
    if wanted := config.getoption("--alone"):
        chosen, others = [], []
        for item in items:
            is_alone = item.get_closest_marker("alone") is not None
            (chosen if is_alone is (wanted == "only") else others).append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = chosen


def pytest_collection_finish() -> None:
    """Exempt the objects that the collection has made from garbage collections: several hundred thousand, which stay."""
    gc.collect()
    gc.freeze()


def _be_patient_in_an_emulator() -> None:
    """Switch off the checks of hypothesis that fail a test whose examples take long to make."""
    from hypothesis import HealthCheck, settings  # noqa: PLC0415  it takes a second

    settings.register_profile("emulated", deadline=None, suppress_health_check=list(HealthCheck))
    settings.load_profile("emulated")


def pytest_configure(config: pytest.Config) -> None:
    """Make Ctrl-C and hang-ups reach children even under `nohup` and CI runners, which pass them on as ignored; set the scope."""
    defaults = {
        signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL,
    }  # fmt: skip
    for number, default in defaults.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)
    if emulated.IS_EMULATED:
        _be_patient_in_an_emulator()
    has_workers = getattr(config.option, "numprocesses", None)
    if not has_workers and "WORKER_UNSHARE" not in os.environ:
        os.environ["HOOKD_SCOPE"] = f"{MARK}={os.environ.setdefault(MARK, str(os.getpid()))}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Start each worker in a PID namespace of its own, or where that is refused, a mark of its own in the environment."""
    options = own_pids.unshare_options()
    if options is not None:
        os.environ.update(WORKER_PYTHON=sys.executable, WORKER_UNSHARE=options)
    for spec in specs:
        spec.python = (
            str(own_pids.WORKER) if options is not None else f"env {MARK}={os.getpid()}-{spec.id} {sys.executable}"
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file together, which share its plain runs."""
    from tests.support.by_file import ByFile  # noqa: PLC0415  needs pytest-xdist

    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a failure the last lines of the test's processes, their states and the load."""
    report = yield
    if report.failed:
        post_mortem.add_to(report)
    return report


def pytest_runtest_logstart() -> None:
    """Forget the processes of earlier tests."""
    post_mortem.forget_ended()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """An ExitStack that is closed after the test."""
    with contextlib.ExitStack() as exit_stack:
        yield exit_stack


@pytest.fixture(autouse=True)
def _module_call_is_torchs_own() -> Iterator[None]:
    """No test may start or end with a patched `nn.Module.__call__` (only looked at where torch is loaded)."""
    _assert_unpatched("before")
    yield
    _assert_unpatched("after")


def _assert_unpatched(when: str) -> None:
    if hasattr(sys.modules.get("torch.nn"), "Module"):
        from tests.support.watched import is_watched  # noqa: PLC0415  # imports torch

        assert not is_watched(), f"calls of modules are watched {when} the test"
