"""A pytest plugin that runs beside torch's own tests and writes the outcome of each test as a line of JSON.

It is loaded with `-p` in another interpreter, which may have no hookd, so it imports only what that one has. A line is
flushed at once: if a test ends the process, the last line names it. Environment variables, set by `runs.py`:

    TORCH_TESTS_LINES   the file to which lines are appended
    TORCH_TESTS_DONE    a file of test names that are not to run again, one per line
    TORCH_TESTS_HOLD    a directory; where set, the run waits there for `go-collected` and `go-finished`
    TORCH_TESTS_START   the plugins to start hookd with in this process, as JSON; without it hookd is not imported
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

PATIENCE_S = 300
OF_A_FAILURE = 6000
"""Characters of a failure's text that are kept, the last ones."""
WATCHED = """
torch.nn.Module torch.optim.Optimizer torch.autograd torch.Tensor torch.utils.data.dataloader.DataLoader
torch.utils.data.dataloader._BaseDataLoaderIter torch._dynamo.utils.unpatched_nn_module_call
torch._dynamo.variables.nn_module.unpatched_nn_module_call
""".split()
GLOBAL_HOOKS = """
torch.nn.modules.module._global_backward_pre_hooks torch.nn.modules.module._global_backward_hooks
torch.nn.modules.module._global_forward_pre_hooks torch.nn.modules.module._global_forward_hooks
torch.optim.optimizer._global_optimizer_pre_hooks torch.optim.optimizer._global_optimizer_post_hooks
""".split()

OURS = re.compile(r"<hookd |/hookd-payload/|/hookd/target/")


class Recorder:
    """Writes lines, and waits where somebody outside has something to do."""

    def __init__(self) -> None:
        self._lines = Path(os.environ["TORCH_TESTS_LINES"])
        self._hold = os.environ.get("TORCH_TESTS_HOLD")
        self._start = json.loads(os.environ.get("TORCH_TESTS_START", "null"))
        self._pid = os.getpid()

    def write(self, **line: object) -> None:
        if os.getpid() == self._pid:  # a test may fork
            with self._lines.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def wait(self, moment: str) -> None:
        self.write(at=moment, pid=os.getpid())
        end = time.monotonic() + PATIENCE_S
        while self._hold and not Path(self._hold, f"go-{moment}").exists():
            if time.monotonic() > end:
                pytest.exit(f"nobody said that {moment} is over", 70)
            time.sleep(0.02)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        import torch  # noqa: F401

        self._before = watched()
        if self._start is not None:
            import hookd

            hookd.start([tuple(one) for one in self._start], budget=1.0)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        done = set(Path(os.environ["TORCH_TESTS_DONE"]).read_text().splitlines())
        items[:] = [item for item in items if item.nodeid not in done]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(name=report.nodeid, when="collect", outcome="failed", text=str(report.longrepr)[-OF_A_FAILURE:])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.write(collected=len(session.items))
        self.wait("collected")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(begins=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            outcome = report.outcome if not hasattr(report, "wasxfail") else f"x{report.outcome}"
            text = str(report.longrepr)[-OF_A_FAILURE:] if report.failed else ""
            self.write(name=report.nodeid, when=report.when, outcome=outcome, text=text)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.wait("finished")
        if self._start is not None:
            import hookd

            self.write(stopped=hookd.stop())
        now = watched()
        self.write(changed=sorted(name for name in self._before if now.get(name) is not self._before[name]))
        self.write(left=sorted({*ours(now), *ours(hooks())}))
        self.write(at="ended")


def watched() -> dict[str, object]:
    """Return the objects that hookd replaces, and their surroundings, by name: to be compared by identity."""
    found = {}
    for name in WATCHED:
        value = lookup(name)
        if value is not None and not hasattr(value, "__dict__"):
            found[name] = value
        for key, member in list(getattr(value, "__dict__", {}).items()):
            if callable(member):
                found[f"{name}.{key}"] = member
    return found


def hooks() -> dict[str, object]:
    """Return torch's global hooks by name."""
    return {f"{name}[{key}]": hook for name in GLOBAL_HOOKS for key, hook in dict(lookup(name) or {}).items()}


def lookup(name: str) -> object:
    """Return the object with a dotted name, without importing anything; None if it does not exist."""
    module, _, rest = name.rpartition(".")
    if name in sys.modules:
        return sys.modules[name]
    return getattr(lookup(module), rest, None) if module else None


def ours(values: dict[str, object]) -> list[str]:
    """Return the names of those whose code is hookd's."""
    return [name for name, value in values.items() if OURS.search(str(getattr(value, "__code__", "")))]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(), "torch-tests-recorder")
