"""Every version of CPython as the tool: hookd as users install it, without torch, against every real training here.

Slow, because each tool has an environment of its own; `make compat` runs it.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from tests.compat import tools
from tests.compat.trainings import assert_nothing_is_left, training_on
from tests.support import interpreters
from tests.support.environment import REPOSITORY, target_environment
from tests.support.processes import Process, wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.e2e, pytest.mark.compat, pytest.mark.usefixtures("attachable"), pytest.mark.timeout(900),
]  # fmt: skip


@pytest.fixture(scope="module", params=tools.MINORS)
def tool(request, tmp_path_factory) -> Path:
    """Return the Python of a new environment into which hookd was installed."""
    return tools.install(request.param, tmp_path_factory.mktemp("tool"), REPOSITORY)


def run(tool: Path, *arguments: str) -> dict[str, object]:
    """Run a command of hookd to its end, and return the JSON that it prints."""
    with Process([tool, "-m", "hookd", *arguments, "--json"], env=target_environment()) as process:
        return json.loads("\n".join(process.finish()))


@pytest.mark.parametrize("where", ["here", *(interpreters.roots() or [interpreters.no_roots()])])
def test_a_tool_attaches_to_a_training_and_leaves_it_as_it_was(tool, where):
    python = interpreters.with_torch(where)
    with training_on(python) as training:
        plain = training.checksum()
        with training.start("--pause", "0.01") as target:
            target.expect("^step 20 ")
            pid = str(target.pid)
            plugins = ["-p", "nan", "-p", "timing", "-p", "activations"]
            command = [tool, "-m", "hookd", "attach", pid, "--listen", "127.0.0.1:0", *plugins]
            with Process(command, env=target_environment()) as attached:
                attached.expect("never stopped" if python.minor >= (3, 14) else "stopped for")
                wait_until(lambda: run(tool, "report", pid)["step"]["current"] > 3, what="steps are counted")
                report = run(tool, "report", pid)
                assert report["identity"]["python"] == ".".join(map(str, python.version))
                assert report["metrics"]["timing"]
                attached.signal(signal.SIGINT)
                attached.finish()
            assert_nothing_is_left(target.pid)
            assert target.finish()[-1] == plain
