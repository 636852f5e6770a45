"""The ten minutes of docs/tutorials/first-plugin.md, followed word by word: the commands and the function are read out of the document."""

from __future__ import annotations

import ast
import re
import shutil
import socket
import sys

import pytest
import torch
from torch import nn

from hookd.testing.process import WORKLOAD
from tests.support import forked
from tests.support.environment import REPOSITORY, bare_python, target_environment, tool_environment
from tests.support.processes import Process, wait_until

pytestmark = [pytest.mark.usefixtures("attachable")]

GUIDE = (REPOSITORY / "docs" / "tutorials" / "first-plugin.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
PORTS = ("127.0.0.1:9465", "127.0.0.1:9090")


class Shell:
    """One shell, as a person has it open: blocks are typed into it."""

    def __init__(self, directory, **variables):
        self.process = Process(["bash"], env=tool_environment(**variables), cwd=directory, stdin=True)
        self.process.send(f'hookd() {{ "{sys.executable}" -m hookd "$@"; }}')
        self._blocks = 0

    def type(self, block):
        """Run a block; return its output on stdout. Its last command must succeed."""
        self._blocks += 1
        before = len(self.process.out)
        done = self.process.ask(
            f"{block}\necho block {self._blocks} ended with $?", rf"^block {self._blocks} ended with (\d+)$"
        )
        assert done[1] == "0", f"{block}\n{self.process.describe()}"
        return [line for line in self.process.out[before:] if line != done.string]


def own_ports(text):
    """Put free ports in the place of the document's: others may have those."""
    for address in PORTS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            text = text.replace(address, f"127.0.0.1:{probe.getsockname()[1]}")
    return text


def replace_function(file, text):
    """Put a function in the place of the one of its name, as an editor would."""
    (new,) = ast.parse("class _:\n" + text).body[0].body
    source = file.read_text()
    (old,) = (one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef) and one.name == new.name)
    lines = source.splitlines(keepends=True)
    lines[old.lineno - 1 : old.end_lineno] = [text]
    file.write_text("".join(lines))


def first_output():
    """Return the output of the training's first layer for its batch, before any step."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4)]
    return layers[0](torch.randn(4, 8)).detach()


@pytest.fixture
def training(stack):
    """A training that runs in an environment without hookd."""
    process = stack.enter_context(
        Process([bare_python(), WORKLOAD], env=target_environment(), stdin=True, popen=forked.start)
    )
    process.expect("^ready$")
    return process


@pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None, reason="Prometheus is not installed here"
)
@pytest.mark.load
def test_an_idea_becomes_a_number_in_prometheus(stack, tmp_path, training):
    assert [kind for kind, _ in BLOCKS] == ["sh", "python", "sh", "sh", "sh", "sh"]
    ported = own_ports("\0".join(text for _, text in BLOCKS)).split("\0")
    new, function, check, attach, prometheus, query = ported
    shell = Shell(tmp_path, PID=str(training.pid))
    stack.callback(shell.process.close)

    # given a package as `plugin new` writes it, when one function is edited, then the check has nothing to say
    shell.type(new)
    replace_function(tmp_path / "hookd-spread" / "hookd_spread" / "__init__.py", function)
    assert any(line.startswith("forward ") for line in shell.type(check))
    assert any("no problems found" in line for line in shell.process.err)

    # when it is loaded into a training that runs, then Prometheus answers with its numbers
    shell.type(attach)
    shell.process.expect(r"http://127\.0\.0\.1:\d+")
    shell.type(prometheus)

    def answer():
        lines = [line for line in shell.type(f"sleep 0.5; {query.rstrip()} || true") if 'module="0"' in line]
        return lines[0] if lines else None

    line = wait_until(answer, what=shell.process.describe)
    assert line.startswith("hookd_spread_output{")
    value = float(re.search(r"=> (\S+) @", line)[1])
    output = first_output()
    assert value == pytest.approx(float(output.std(correction=0)), rel=0.3)  # some steps have been trained meanwhile
    assert abs(value - float(output.abs().max())) > 0.5  # and not what the package was written with

    # and when hookd is ended, then the training goes on
    shell.type("kill %1; wait %1 || true")
    seen = len(training.out)
    training.expect(r"^\d+$", after=seen)


def test_a_subprocess_target_has_the_plugin_in_it_by_the_real_way(subprocess_target, tmp_path):
    (tmp_path / "hookd_widths.py").write_text(
        "from hookd import Plugin, hookimpl\n\n\nclass Widths(Plugin):\n    name = 'widths'\n\n"
        "    @hookimpl\n    def configure(self, context):\n"
        "        self.calls = context.gauge('width', 'Numbers in an output.', ['module'])\n\n"
        "    @hookimpl\n    def forward(self, module, output):\n"
        "        self.calls.labels(module.name).set(output.numel())\n"
    )
    target = subprocess_target("widths", plugin_dir=tmp_path)
    target.assert_metrics(
        {
            'hookd_plugin_state{plugin="widths",state="active"}': 1,
            'hookd_widths_width{module="0"}': 64,
            'hookd_widths_width{module="4"}': 16,
        }
    )
    target.detach()
