"""`%load_ext hookd` in IPython's shell and in a real kernel."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import nn

import hookd
from hookd.target.boot import bootstrap

missing = [name for name in ("IPython", "ipykernel", "jupyter_client") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.load,  # `make long` installs what it is about
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    pytest.mark.filterwarnings("default"),  # theirs are not ours to mend
]
TORCHS_OWN = nn.Module.__call__
MARKUP = "<script>alert(1)</script>"
TRAIN = """
def train(steps):
    net = torch.nn.Sequential()
    net.add_module(NAME, torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(2, 4)).sum().backward()
        optimizer.step()
"""
PATIENCE_S = 60.0


@pytest.fixture
def shell(monkeypatch, tmp_path):
    """IPython's shell in this process, without a terminal and without its history."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    made = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}), user_ns={"torch": torch})
    made.user_ns["NAME"] = f"a\x1b[31m{MARKUP}"
    made.run_cell(TRAIN).raise_error()
    yield made
    if bootstrap.attached() is not None:
        hookd.stop()


@pytest.fixture
def run(shell, capsys):
    def run(cell):
        capsys.readouterr()
        result = shell.run_cell(cell)
        out, err = capsys.readouterr()
        return result.success, out + err

    return run


def test_in_a_terminal_a_table_is_shown_and_the_kernel_is_left_as_it_was(run):
    assert run("%load_ext hookd")[0]
    ok, output = run("%hookd timing nan:every=1")
    assert ok
    assert "running, 0 steps" in output
    ok, output = run("%%hookd\ntrain(3)\nprint('done')")
    assert ok
    assert output.startswith("done\nhookd: running, 3 steps")
    (row,) = [line for line in output.splitlines() if "Linear" in line]
    assert row.startswith("a\\x1b[31m<script>")
    assert row.split()[2] == "3"
    assert run("%hookd")[1].count("\n") > 2
    ok, output = run("%hookd stop")
    assert ok
    assert "detached, 3 steps" in output
    assert nn.Module.__call__ is TORCHS_OWN
    assert bootstrap.attached() is None


def test_what_is_wrong_is_reported_in_a_line(run):
    run("%load_ext hookd")
    for cell, why in (
        ("%hookd stop", "has not started anything"),
        ("%hookd typo", "no plugin 'typo'"),
        ("%hookd nan:every", "options are NAME=VALUE"),
    ):
        ok, output = run(cell)
        assert not ok
        assert why in output
        assert "Traceback" not in output
    assert bootstrap.attached() is None
    run("%hookd timing")
    ok, output = run("%hookd nan")
    assert not ok
    assert "already observed" in output
    ok, output = run("%%hookd\n1 / 0")
    assert not ok
    assert output.count("division by zero") == 1


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """A kernel of this Python, in a process of its own."""
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import KernelManager

    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    manager = KernelManager(transport="ipc", connection_file=str(tmp_path / "kernel.json"))
    manager._kernel_spec = KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    manager.start_kernel()
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=PATIENCE_S)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def messages_of(kernel, code):
    """Run a cell; return its messages, in order."""
    reported = []
    request = kernel.execute(code, store_history=False)
    while True:
        message = kernel.get_iopub_msg(timeout=PATIENCE_S)
        if message["parent_header"].get("msg_id") != request:
            continue
        reported.append((message["msg_type"], message["content"]))
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return reported


def test_in_a_notebook_the_table_is_renewed_while_the_cell_runs(kernel):
    assert "error" not in dict(messages_of(kernel, f"import torch\n%load_ext hookd\nNAME = 'fc'\n{TRAIN}"))
    # The cell waits for the table's thread: until the name of the module stands in a table that was shown meanwhile.
    waits = """
%%hookd timing
import threading
import hookd.integrations.jupyter as ours
shown, whole = threading.Event(), ours.Table
class Seen(whole):
    def __init__(self, report):
        super().__init__(report)
        if threading.current_thread().name == "hookd-table" and report["modules"]: shown.set()
ours.Table = Seen
train(5)
assert shown.wait(60)
print("waited")
"""
    reported = messages_of(kernel, waits.strip())
    kinds = [kind for kind, _ in reported]
    assert "error" not in kinds, reported
    first = next(content for kind, content in reported if kind == "display_data")
    renewed = [content for kind, content in reported if kind == "update_display_data"]
    assert len(renewed) >= 2  # by the thread, and at the end
    assert {one["transient"]["display_id"] for one in renewed} == {first["transient"]["display_id"]}
    assert any(">fc</td>" in one["data"]["text/html"] for one in renewed[:-1])
    assert "running, 5 steps" in renewed[-1]["data"]["text/plain"]
    (shown,) = [content for kind, content in messages_of(kernel, "%hookd stop") if kind == "display_data"]
    assert "detached, 5 steps" in shown["data"]["text/plain"]
