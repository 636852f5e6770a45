"""What holds for all tests: nothing of ours stays installed, and tests of whole processes are marked as such."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["hookd.testing.fixtures"]
"""Named here too: an environment may have been made before there was such an entry point."""

E2E = Path(__file__).parent / "e2e"
NODE = (
    "test_ask", "test_cli", "test_cli_run", "test_compared", "test_containers", "test_daemon", "test_daemon_leases",
    "test_daemon_restarts", "test_daemon_scrape", "test_daemon_tls", "test_deaths", "test_demo", "test_doctor",
    "test_documented", "test_examples_at_once", "test_grafana", "test_hangs", "test_hosts", "test_incidents", "test_page_web", "test_plugins",
    "test_prometheus", "test_ranks", "test_rules", "test_run", "test_top", "test_upgrade",
)  # fmt: skip
"""What runs a daemon or lists processes: these see everything on this machine, so two of them never run at a time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(E2E):
            item.add_marker(pytest.mark.e2e)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests together of which no two may run at a time, and those of a file, which share its plain runs."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "node" if Path(file).stem in NODE else file

    return ByFile(config, log)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """What a test starts and enters here is left and ended behind it."""
    with contextlib.ExitStack() as held:
        yield held


@pytest.fixture(autouse=True)
def _module_call_is_torchs_own() -> Iterator[None]:
    """No test may start or end with a patched `nn.Module.__call__` (only looked at where torch is loaded)."""
    _assert_unpatched("before")
    yield
    _assert_unpatched("after")


def _assert_unpatched(when: str) -> None:
    module = getattr(sys.modules.get("torch.nn"), "Module", None)
    if module is not None:
        call = module.__dict__["__call__"]
        home = module._call_impl.__code__.co_filename
        assert call.__code__.co_filename == home, f"nn.Module.__call__ is patched {when} the test: {call}"
