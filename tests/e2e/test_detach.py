"""Detach leaves the process as it was: checked from inside by a target that knows all that a guest could change."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from hookd.native import build
from hookd.tool.attach import Control
from hookd.tool.cli.target_checks import of_target
from tests.support import cgroup, tool
from tests.support.processes import Process, wait_until
from tests.support.puppet import assert_as_before, probe, started
from tests.support.tool import Attachment, Page, has_page, plugin_options

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("attachable")]

OBSERVERS = ("nan:every=1", "timing", "activations:every=1", "everything:every=1")
PLUGIN_DIR = Path(__file__).parent / "plugins"
PLUGINS = [*plugin_options(OBSERVERS), "--plugin-dir", PLUGIN_DIR]
KERNEL, ENTRY = build.place("kernel"), build.place("entry")


@pytest.fixture
def puppet(tmp_path):
    """Start one whose temporary files would be in tmp_path."""
    with started(TMPDIR=tmp_path) as process:
        yield process


def cost(process: Process) -> float:
    return float(process.ask("cost", r"^cost ([\d.]+)").group(1))


def memory(process: Process) -> int:
    return int(process.ask("memory", r"^memory (\d+)").group(1))


def steps(process: Process) -> int:
    return int(process.ask("step", r"^stepped (\d+)").group(1))


def files_of_ours(pid: int) -> set[str]:
    """Name everything that could be a trace of hookd outside of the process, for any user of this machine."""
    shared = {str(path) for home in ("/tmp", "/dev/shm", "/var/tmp", "/run") for path in Path(home).glob("*hookd*")}
    sockets = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "hookd" in line}
    own = re.compile(rf"hookd-{pid}-")  # `attach-44-…` is a tool's, which may have that number in another pid namespace
    return {name for name in shared | sockets if own.search(name)} | {f for f in shared if "payload" in f}


def attach_in_process(pid: int) -> None:
    """Attach through the Python interface, with no lease to hold."""
    from hookd.tool.attach import AttachRequest, attach
    from hookd.tool.config import PluginSpec

    specs = tuple(PluginSpec.parse(text) for text in OBSERVERS)
    attach(pid, AttachRequest(plugins=specs, lease_s=None, plugin_dirs=(PLUGIN_DIR,), timeout_s=60))


def detach_in_process(pid: int) -> dict[str, Any]:
    from hookd.tool.attach import detach

    return detach(pid)


def observed_steps(pid: int, more: int = 2) -> None:
    """Wait until the page of a target says that some steps were seen."""
    page = Page.of(pid)
    assert page is not None
    with page:
        wait_until(lambda: page.values()["hookd_steps"].get((), 0) >= more, what="observed steps")


def test_after_ctrl_c_everything_in_the_target_is_as_it_was(puppet, tmp_path):
    before, files = probe(puppet), files_of_ours(puppet.pid)
    with Attachment([puppet.pid], *PLUGINS) as attachment:
        wait_until(lambda: attachment.metrics().total("hookd_steps_total") >= 3, what="three steps")
        during = probe(puppet)
        assert during["replaced"], "nothing was patched: the test proves nothing"
        assert any("hookd-kernel" in name for name in during["maps"]) == KERNEL.exists()
        assert during["sys.path"] == before["sys.path"]
        assert during["sys.meta_path"] == before["sys.meta_path"]
        assert during["environment"] == before["environment"]
        assert "_hookd.target" in during["modules"], "the names are others: what follows proves nothing"
        assert not [name for name in during["modules"] if name.startswith(("hookd", "pluggy"))], "only private names"
        assert during["module state"] == before["module state"], "nothing is ever stored on a module"
        attachment.detach()
    assert_as_before(puppet, before)
    assert files_of_ours(puppet.pid) <= files
    assert list(tmp_path.iterdir()) == []
    assert steps(puppet) > 0
    assert not has_page(puppet.pid)


def test_hookd_detach_restores_everything(puppet):
    before = probe(puppet)
    attach_in_process(puppet.pid)
    observed_steps(puppet.pid)
    tool.hookd("detach", str(puppet.pid))
    assert_as_before(puppet, before)


@pytest.mark.load
@pytest.mark.skipif(not KERNEL.exists(), reason="no kernel was made at install: there was no C compiler")
def test_the_kernel_comes_with_the_agent_and_goes_with_it(puppet):
    before = probe(puppet)
    assert not any("hookd" in name for name in before["maps"])
    attach_in_process(puppet.pid)
    observed_steps(puppet.pid)
    assert any("hookd-kernel" in name for name in probe(puppet)["maps"])
    detach_in_process(puppet.pid)
    assert_as_before(puppet, before)


@pytest.mark.load
def test_attach_again_works_and_counts_anew(puppet):
    before = probe(puppet)
    for _ in range(2):
        with Attachment([puppet.pid], *PLUGINS) as attachment:
            wait_until(lambda: attachment.metrics().total("hookd_steps_total") >= 3, what="three steps")
            assert attachment.metrics().total("hookd_timing_forward_calls_total", module="(root)") >= 3
            attachment.detach()
        assert_as_before(puppet, before)


def test_a_second_attach_finds_the_first_agent_and_one_detach_is_enough(puppet):
    before = probe(puppet)
    attach_in_process(puppet.pid)
    observed_steps(puppet.pid)
    attach_in_process(puppet.pid)  # of the existing agent
    observed_steps(puppet.pid)
    detach_in_process(puppet.pid)
    assert_as_before(puppet, before)


def test_a_killed_tool_leaves_no_agent_behind(puppet):
    """The agent of a foreground attach detaches itself when its lease has run out."""
    before = probe(puppet)
    from hookd.tool.attach import AttachRequest, attach
    from hookd.tool.config import PluginSpec

    specs = tuple(PluginSpec.parse(text) for text in OBSERVERS)
    attach(puppet.pid, AttachRequest(plugins=specs, lease_s=1, plugin_dirs=(PLUGIN_DIR,), timeout_s=60))
    wait_until(lambda: not has_page(puppet.pid), what="the agent to leave by itself")
    assert_as_before(puppet, before)


@pytest.mark.load
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cycles", [20, pytest.param(50, marks=pytest.mark.load)])
def test_cycles_leak_nothing(puppet, cycles):
    before, cheap = probe(puppet), statistics.median(cost(puppet) for _ in range(3))
    resident = []
    for cycle in range(cycles):
        attach_in_process(puppet.pid)
        observed_steps(puppet.pid, 1)
        detach_in_process(puppet.pid)
        resident.append(memory(puppet))
        if cycle % 10 == 9:
            assert_as_before(puppet, before)
    # What leaks at each attach grows over any five; an arena that the allocator opens for a thread is one step.
    grown = statistics.median(after - at for at, after in zip(resident[4:], resident[9:], strict=False))
    assert grown < 2 << 20, f"memory in use grew by {grown} bytes in 5 cycles: {resident}"
    now = statistics.median(cost(puppet) for _ in range(3))
    assert now < 1.25 * cheap, f"an unpatched call costs {now / cheap:.2f} times what it did"
    assert steps(puppet) > cycles


@pytest.mark.skipif(not ENTRY.exists(), reason="no entry was made at install: there was no C compiler")
def test_the_entry_replaces_nothing_and_can_always_be_given_back(tmp_path):
    with started(TMPDIR=tmp_path) as puppet:
        before = probe(puppet)
        for _ in range(3):
            attach_in_process(puppet.pid)
            observed_steps(puppet.pid)
            during = probe(puppet)
            assert any("hookd-entry" in name for name in during["maps"])
            assert during["entered"]
            assert "nn.Module.__call__" not in during["replaced"]
            puppet.ask("cover", "^covered$")
            observed_steps(puppet.pid)
            assert detach_in_process(puppet.pid)["restored"] == "identity"
            assert not probe(puppet)["entered"]
            puppet.ask("uncover", "^uncovered$")
        assert_as_before(puppet, before)


def test_attach_on_top_of_somebodys_patch_and_detach_to_it(puppet):
    puppet.ask("cover", "^covered$")
    before = probe(puppet)
    assert before["replaced"] == ["nn.Module.__call__"]
    attach_in_process(puppet.pid)
    observed_steps(puppet.pid)
    assert detach_in_process(puppet.pid)["restored"] == "identity"
    puppet.ask("uncover", "^uncovered$")
    assert probe(puppet)["replaced"] == []
    assert steps(puppet) > 0


def test_detach_of_the_patch_in_python_under_one_that_somebody_put_on_top(tmp_path):
    """hookd cannot restore a method that somebody else has covered: the call goes through, and hookd says so."""
    with started(TMPDIR=tmp_path, HOOKD_ENTRY="0") as puppet:
        before = probe(puppet)
        attach_in_process(puppet.pid)
        observed_steps(puppet.pid)
        puppet.ask("cover", "^covered$")
        answer = detach_in_process(puppet.pid)
        assert answer["restored"] in {"pass-through", "pending"}
        trained = steps(puppet)
        wait_until(lambda: steps(puppet) > trained, what="training to go on")
        puppet.ask("uncover", "^uncovered$")
        attach_in_process(puppet.pid)
        observed_steps(puppet.pid)
        detach_in_process(puppet.pid)
        wait_until(lambda: probe(puppet)["tasks"] == before["tasks"], what="the last thread to end")
        assert probe(puppet)["fds"] == before["fds"]


def test_a_detach_that_has_timed_out_is_not_carried_out_later(puppet):
    before = probe(puppet)
    attach_in_process(puppet.pid)
    with cgroup.frozen(puppet.pid):
        with Control.connect(puppet.pid) as control:
            control._connection.sendall(b'{"op": "detach", "timeout": 1}\n')  # who asks gives up before it goes on
        (check,) = (one for one in of_target(puppet.pid) if one.name == "state")
        assert "is frozen" in check.found
    observed_steps(puppet.pid, more=steps(puppet) + 2)
    assert detach_in_process(puppet.pid)["restored"] == "identity"
    assert_as_before(puppet, before)
