"""From a NaN to a reproduction: a training that nobody has changed, attached to, killed, and its failure seen again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hookd.errors import UsageError
from hookd.tool.cli.replay import answer
from tests.support import training
from tests.support.environment import TARGETS, bare_python, tool_environment
from tests.support.processes import wait_until
from tests.support.tool import HOOKD, Attachment, Page
from tests.support.training import Job

CONSOLE = Path(sys.executable).with_name("hookd")

pytestmark = [pytest.mark.e2e]  # several processes import torch, one after the other


def replay(*words, **variables):
    return subprocess.run(
        [*HOOKD, "replay", *map(str, words)],
        capture_output=True, text=True, timeout=110, check=False, env=tool_environment(**variables),
    )  # fmt: skip


def bundle_of(directory, options):
    """Attach to a training, let one of its layers overflow, and kill it when the bundle of that is there."""
    now = directory.with_name("now")
    job = Job("faulty.py", f"--fault overflow --when {now} --steps 0 --pause 0.05")
    with training.start_warm(job) as process:
        process.expect(r"^step 3 ")
        attached = Attachment([process.pid], "-p", f"capture:directory={directory},{options}")
        with attached, Page.below(process) as page:
            wait_until(lambda: page.values()["hookd_steps"].get((), 0) > 10, what="a look at all modules")
            now.touch()
            reported = wait_until(lambda: [one for one in page.read().incidents if one["kind"] == "bundle"])
            process.signal(signal.SIGKILL)
            process.wait()
    return Path(reported[0]["bundle"])


@pytest.mark.load
@pytest.mark.usefixtures("attachable")
def test_the_failure_of_a_killed_training_is_seen_again_in_a_process_of_its_interpreter(tmp_path):
    bundle = bundle_of(tmp_path / "bundles", "every=1")
    done = replay(bundle, "--python", bare_python(), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["module"], found["class"]) == ("layers.2.linear", "Linear")
    assert (found["is_reproduced"], found["is_bit_equal"], found["notes"]) == (True, True, [])
    assert found["first"]["operation"] == "aten.addmm.default"

    done = replay(bundle, "--python", bare_python())
    assert done.returncode == 0, done.stderr
    assert "layers.2.linear (Linear)" in done.stdout
    assert "reproduced; the output is bit for bit what was recorded" in done.stdout


@pytest.mark.load
@pytest.mark.usefixtures("attachable")
def test_a_model_with_classes_of_the_script_needs_the_script_and_nothing_of_its_training_runs(tmp_path):
    bundle = bundle_of(tmp_path / "bundles", "every=500")
    done = replay(bundle, "--python", bare_python(), "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["reason"] == "import"
    assert "--source" in done.stderr

    done = replay(bundle, "--python", bare_python(), "--source", TARGETS / "faulty.py", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["module"], found["is_bit_equal"]) == ("(root)", True)
    assert found["first"]["module"] == "layers.2.linear"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A bundle made without a training, of a module that works."""
    directory = tmp_path_factory.mktemp("small")
    code = (
        "import torch, hookd\n"
        f"hookd.start([('capture', {{'directory': {str(directory)!r}}})])\n"
        "module = torch.nn.Linear(2, 2)\n"
        "module.register_forward_hook(lambda _m, _i, output: output * float('nan'))\n"
        "module(torch.ones(1, 2))\n"
        "hookd.stop()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110, env=tool_environment())
    (bundle,) = directory.iterdir()
    return bundle


@pytest.mark.load
def test_what_does_not_fail_again_has_exit_code_1_and_says_what_was_not_carried(small):
    done = replay(small, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert (found["is_reproduced"], found["reason"]) == (False, "not-reproduced")
    assert "hook of others" in found["notes"][0]


def test_an_interpreter_without_torch_and_one_that_is_none_are_named(small, tmp_path):
    done = replay(small, "--python", tmp_path / "python")
    assert (done.returncode, str(tmp_path / "python") in done.stderr) == (2, True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty"], check=True, timeout=110)
    done = replay(small, "--python", tmp_path / "empty" / "bin" / "python", "--json")
    assert (done.returncode, json.loads(done.stdout)["reason"]) == (2, "no-torch")
    assert "--python" in done.stderr


@pytest.mark.load
def test_an_installed_package_is_imported_where_it_is_allowed(tmp_path, monkeypatch):
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "__init__.py").write_text(
        "import torch\nclass Bad(torch.nn.Linear):\n"
        "    def forward(self, x):\n        return super().forward(x) * float('nan')\n"
    )
    code = (
        "import torch, hookd, mypackage\n"
        "hookd.start([('capture', {'directory': 'bundles'})])\n"
        "mypackage.Bad(2, 2)(torch.ones(1, 2))\nhookd.stop()\n"
    )
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110, env=tool_environment())
    (bundle,) = (tmp_path / "bundles").iterdir()
    done = replay(bundle, "--json")
    assert (done.returncode, json.loads(done.stdout)["reason"]) == (2, "import")
    assert "--allow-import" in done.stderr
    done = replay(bundle, "--allow-import", "mypackage", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["is_reproduced"]


def test_a_time_limit_is_kept(small):
    done = replay(small, "--timeout", "0.01", "--json")
    assert (done.returncode, json.loads(done.stdout)["reason"]) == (1, "timeout")


def test_without_the_plugin_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("hookd.tool.attach.sources.GROUP", "hookd.no-plugins")
    with pytest.raises(UsageError, match="the plugin capture is not installed") as refused:
        answer({}, sys.executable, 1)
    assert "pip install" in refused.value.hint


def test_what_is_no_bundle_is_said_to_be_none(tmp_path):
    done = replay(tmp_path, "--json")
    assert (done.returncode, json.loads(done.stdout)["reason"]) == (2, "bundle")
    assert "bundle.json" in done.stderr


@pytest.mark.skipif(not CONSOLE.exists(), reason="hookd is not installed here")
def test_nothing_of_the_directory_in_which_it_is_run_is_imported(small, tmp_path, monkeypatch):
    for name in ("torch", "contextlib", "os"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    words = [CONSOLE, "replay", small, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110, check=False, env=tool_environment())
    assert json.loads(done.stdout)["reason"] == "not-reproduced"
    assert not (tmp_path / "was-run").exists()
