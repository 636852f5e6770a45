"""The program's own `hookd`, and modules with plugins' names: the payload in a process hides none of them, nor finds any."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import tool
from tests.support.environment import TARGETS, bare_python, target_environment, tool_environment
from tests.support.importing import ask, assert_modules_stay, lay_widths
from tests.support.processes import Process, wait_until
from tests.support.tool import Attachment

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e]

TRAINS = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def train(bad=False):
    optimizer.zero_grad()
    net(torch.full((2, 4), float('nan') if bad else 1.0)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def directory(tmp_path):
    """A directory with a plugin `widths`, and a module of the program's own of that name."""
    lay_widths(tmp_path)
    return tmp_path


def environment(directory: Path) -> dict[str, str]:
    """Return that of a program with an installed hookd, and with modules of its own."""
    known = tool_environment()
    return known | {"PYTHONPATH": ":".join(filter(None, [str(directory / "program"), known.get("PYTHONPATH")]))}


@pytest.mark.usefixtures("attachable")
@pytest.mark.parametrize(
    "is_first", [pytest.param(True, marks=pytest.mark.load), False], ids=["imported-before", "imported-while-attached"]
)
def test_modules_that_are_installed_are_the_same_before_during_and_after_an_attach(directory, is_first):
    command = [sys.executable, TARGETS / "importing.py"]
    with Process(command, env=environment(directory), stdin=True) as process:
        process.expect("^ready$")
        assert_modules_stay(process, directory, is_first=is_first)


@pytest.mark.usefixtures("attachable")
def test_where_hookd_is_not_installed_it_cannot_be_imported_while_attached():
    names = ("hookd", "hookd.errors", "hookd_timing", "pluggy")
    with Process([bare_python(), TARGETS / "importing.py"], env=target_environment(), stdin=True) as process:
        process.expect("^ready$")
        plain = [ask(process, f"import {name}") for name in names]
        assert all("ModuleNotFoundError" in one for one in plain)
        with Attachment([process.pid], "-p", "timing") as attachment:
            wait_until(lambda: attachment.metrics().total("hookd_steps_total") >= 3, what="three steps")
            assert [ask(process, f"import {name}") for name in names] == plain


STARTS = """
import hookd, hookd.testing, hookd_nan, widths
{first}
from hookd.integrations.table import Table
assert widths.of_the_program and hookd.testing.FakeTarget
{second}
assert all('/hookd-payload/' not in m.__file__ for n, m in list(sys.modules.items()) if n.startswith('hookd'))
for ask in (hookd.read, hookd.start, hookd.stop, hookd.testing.FakeTarget().start):
    try:
        ask()
    except hookd.HookdError as error:
        assert error.reason == 'already-attached' and 'hookd detach' in error.hint, vars(error)
    else:
        raise AssertionError(ask)
with hookd.observe() as seen:
    train()
print('observe', seen.report)
try:
    while True:
        train(bad=True)
except hookd.TrainingError as error:
    assert isinstance(error, FloatingPointError)
    print(type(error).__module__, type(error).__name__, str(error))
"""


@pytest.mark.parametrize("order", ["torch-first", pytest.param("hookd-first", marks=pytest.mark.load)])
def test_a_script_under_hookd_run_imports_what_is_installed_and_catches_its_classes(directory, order):
    own, torch = "import sys\n" + STARTS, TRAINS
    text = (
        own.format(first=torch, second="")
        if order == "hookd-first"
        else "import torch\n" + own.format(first="", second=torch)
    )
    (directory / "train.py").write_text(text)
    path = environment(directory)["PYTHONPATH"]
    words = ["-p", "nan:policy=raise,every=1", "-p", "widths", "--plugin-dir", directory / "plugins"]
    with tool.run(*words, program=[sys.executable, directory / "train.py"], PYTHONPATH=path) as process:
        out = process.finish()
    assert out[0] == "observe None"
    assert out[1].startswith("hookd_nan.policy NonFiniteError first NaN: "), out
    assert any(
        "hookd did not start an agent here: an agent runs in this process already" in line for line in process.err
    )


def test_an_error_for_the_training_is_shown_by_its_public_name(tmp_path):
    """Where the program has not imported hookd, or has none."""
    (tmp_path / "train.py").write_text(TRAINS + "while True:\n    train(bad=True)\n")
    with tool.run("-p", "nan:policy=raise,every=1", program=[bare_python(), tmp_path / "train.py"]) as process:
        assert process.wait() == 1
    assert any(line.startswith("hookd_nan.policy.NonFiniteError: first NaN") for line in process.err), (
        process.describe()
    )


TRAINS_IN_A_TEST = (
    TRAINS
    + """
from hookd import Plugin, hookimpl
class Counts(Plugin):
    name = 'counts'
    steps = 0
    @hookimpl
    def step_post(self):
        self.steps += 1
def test_trains():
    before = [p.clone() for p in net.parameters()]
    train()
    assert any(not torch.equal(a, b) for a, b in zip(before, net.parameters()))
def test_another_agent_is_refused(fake_target):
    import pytest, hookd
    with pytest.raises(hookd.HookdError, match='an agent runs in this process already'):
        fake_target.start(Counts)
"""
)


@pytest.mark.skipif(
    not [one for one in importlib.metadata.entry_points(group="pytest11") if one.value == "hookd.testing.fixtures"],
    reason="hookd is not installed here, so pytest does not know its fixtures",
)
@pytest.mark.load
def test_pytest_runs_under_hookd_run_where_a_plugin_of_it_imports_torch_early(tmp_path):
    (tmp_path / "early.py").write_text("import torch\n")
    (tmp_path / "test_trains.py").write_text(TRAINS_IN_A_TEST)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "early", "-p", "no:cacheprovider", tmp_path]
    with tool.run("-p", "timing", program=words, PYTHONPATH=tmp_path) as process:
        assert process.wait() == 0, process.describe()
    assert any("2 passed" in line for line in process.out), process.describe()
