"""`hookd run`'s ground: the environment of a command, and how the command runs in it."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from hookd.attach import launch
from hookd.attach.request import AttachRequest
from hookd.errors import UsageError
from tests.support import stub
from tests.support.environment import REPOSITORY, target_environment, tool_environment
from tests.support.processes import Process, wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.timeout(180)]

MARK = """
import os
def start(config, loader=None):
    import json, sys
    from multiprocessing.process import current_process
    with open(os.path.join(os.environ["MARKS"], str(os.getpid())), "w") as file:
        json.dump([config["method"], os.getppid(), "torch" in sys.modules, current_process().name], file)
"""


class Launched:
    """A launch whose agent leaves a mark for each process in which it starts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.marks_directory = directory / "marks"
        self.marks_directory.mkdir()
        base = target_environment(PYTHONPATH=stub.torch_directory(directory), MARKS=self.marks_directory)
        self.launch = launch.prepare(AttachRequest(plugins=()), base)

    def run(self, program: str, *arguments: str | Path, **extra: str) -> Process:
        command = [sys.executable, *arguments, *(["-c", program] if program else [])]
        return Process(command, env=self.launch.env | extra, cwd=self.directory)

    def marks(self) -> dict[int, list[object]]:
        """Give method, parent, whether torch was there, and multiprocessing's name, by pid."""
        return {int(path.name): json.loads(path.read_text()) for path in self.marks_directory.iterdir()}


@pytest.fixture
def launched(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.payload, "build", lambda *_: stub.stub_payload(MARK.encode()))
    made = Launched(tmp_path)
    yield made
    made.launch.cleanup()
    assert not made.launch.directory.exists()


def test_the_agent_starts_when_torch_has_been_imported(launched):
    with launched.run("import torch; print('ran')") as process:
        assert process.finish() == ["ran"]
        assert launched.marks() == {process.pid: ["run", os.getpid(), True, "MainProcess"]}
    assert launched.launch.failures() == {}


def test_a_program_without_torch_is_left_alone(launched):
    with launched.run("import json; print('ran')") as process:
        assert process.finish() == ["ran"]
    assert launched.marks() == {}


def test_imports_are_as_without_hookd(launched):
    program = """
import sys
import torch
assert not [path for path in sys.path if 'hookd' in path], sys.path
assert not [finder for finder in sys.meta_path if 'sitecustomize' in type(finder).__module__]
assert 'exec_module' not in vars(torch.__loader__) and torch.__loader__ is torch.__spec__.loader
"""
    with launched.run(program) as process:
        process.finish()
        assert process.err == []


def test_a_sitecustomize_of_the_user_is_run_and_found(launched):
    there = launched.directory / "theirs"
    there.mkdir()
    (there / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = __file__\n")
    path = os.pathsep.join([launched.launch.env["PYTHONPATH"], str(there)])
    program = "import sitecustomize, torch; assert sitecustomize.__file__ == theirs; print('ran')"
    with launched.run(program, PYTHONPATH=path) as process:
        assert process.finish() == ["ran"]
        assert process.err == []
    assert len(launched.marks()) == 1


def test_a_sitecustomize_of_the_user_that_fails_fails_as_without_hookd(launched):
    there = launched.directory / "theirs"
    there.mkdir()
    (there / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
    path = os.pathsep.join([launched.launch.env["PYTHONPATH"], str(there)])
    with launched.run("import torch; print('ran')", PYTHONPATH=path) as process:
        assert process.finish() == ["ran"]
        assert any("theirs" in line for line in process.err)
    assert len(launched.marks()) == 1


SPAWNS = """
import multiprocessing, sys
def work():
    import torch
    print('work', flush=True)
if __name__ == '__main__':
    context = multiprocessing.get_context(sys.argv[1])
    process = context.Process(target=work, name='trainer')
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_spawned_trainer_has_an_agent(launched, method):
    """Neither the parent, which does not import torch, nor the fork server or the resource tracker has one."""
    script = launched.directory / "script.py"
    script.write_text(SPAWNS)
    with launched.run("", script, method) as process:
        assert process.finish() == ["work"]
    assert [mark[3] for mark in launched.marks().values()] == ["trainer"]


def test_a_spawned_data_loader_worker_has_none(launched):
    package = launched.directory / "stub" / "torch" / "utils" / "data"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("def _worker_loop():\n    import torch\n    print('work', flush=True)\n")
    script = launched.directory / "script.py"
    script.write_text(
        SPAWNS.replace("target=work", "target=_worker_loop").replace("if __name__", IMPORT + "if __name__", 1)
    )
    with launched.run("", script, "spawn") as process:
        assert process.finish() == ["work"]
        assert list(launched.marks()) == [process.pid]


IMPORT = "from torch.utils.data import _worker_loop\n"


def test_a_launcher_has_none_and_its_ranks_have(launched):
    (launched.directory / "torchrun").write_text(
        "import subprocess, sys, torch\nsubprocess.check_call([sys.executable, 'rank.py'])\n"
    )
    (launched.directory / "rank.py").write_text("import torch\n")
    with launched.run("", "torchrun") as process:
        process.finish()
        assert [mark[1] for mark in launched.marks().values()] == [process.pid]


def test_disabled_means_disabled(launched):
    with launched.run("import torch", HOOKD_DISABLE="1") as process:
        process.finish()
    assert launched.marks() == {}


def test_an_agent_that_fails_does_not_disturb_the_program_and_is_told_to_the_tool(launched):
    (launched.launch.directory / "payload.zip").write_bytes(b"no zip")
    with launched.run("import torch; print('ran')") as process:
        assert process.finish() == ["ran"]
        assert process.err == []
        assert list(launched.launch.failures()) == [process.pid]


RUN = """
import sys
from hookd.attach import AttachRequest, launch
sys.exit(launch.run(sys.argv[1:], AttachRequest(plugins=())))
"""


def started(*command: str, stdin: bool = False) -> Process:
    environment = tool_environment()
    return Process([sys.executable, "-c", RUN, *command], env=environment, cwd=REPOSITORY, stdin=stdin)


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_exit_code_is_the_commands(code):
    with started("sh", "-c", f"exit {code}") as process:
        assert process.wait() == code


def test_the_exit_code_after_a_signal_is_the_shells():
    with started("sh", "-c", "kill -KILL $$") as process:
        assert process.wait() == 128 + signal.SIGKILL


def test_stdin_stdout_and_stderr_are_the_commands():
    with started("sh", "-c", "read line; echo out $line; echo err $line >&2", stdin=True) as process:
        process.send("through")
        process.finish()
        assert (process.out, process.err) == (["out through"], ["err through"])


def test_the_environment_has_one_more_entry_in_pythonpath_and_nothing_else():
    with started("env", "-0") as process:
        process.finish()
        found = dict(line.split("=", 1) for line in "\n".join(process.out).split("\0") if line)
    environment = tool_environment()
    entry, _, before = found.pop("PYTHONPATH").partition(os.pathsep)
    assert before == environment.pop("PYTHONPATH", "")
    assert launch.is_launched({"PYTHONPATH": entry})
    assert found == environment


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_reaches_the_command(number):
    program = f"""
import signal, sys
def caught(number, frame):
    sys.exit(40 + number)
signal.signal({int(number)}, caught)
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
print('ready', flush=True)
while True:
    signal.pause()
"""
    with started(sys.executable, "-c", program) as process:
        process.expect("^ready$")
        process.signal(number)
        assert process.wait() == 40 + number


def test_a_command_that_is_not_there():
    with pytest.raises(UsageError) as caught:
        launch.run(["no-such-command-here"], AttachRequest(plugins=()))
    assert caught.value.reason == "command-not-found"


def test_nothing_is_left_when_the_command_has_ended(tmp_path):
    with Process([sys.executable, "-c", RUN, "true"], env=tool_environment(TMPDIR=tmp_path), cwd=REPOSITORY) as process:
        process.finish()
    wait_until(lambda: not list(tmp_path.glob("hookd-*")))


def test_what_a_killed_one_has_left_is_removed_by_the_next(tmp_path):
    def run(*command, stdin=False):
        command, environment = [sys.executable, "-c", RUN, *command], tool_environment(TMPDIR=tmp_path)
        return Process(command, env=environment, cwd=REPOSITORY, stdin=stdin)

    with run("cat", stdin=True) as killed, run("cat", stdin=True) as alive:
        wait_until(lambda: len(list(tmp_path.glob("hookd-*/site/*.py"))) == 2)
        killed.signal(signal.SIGKILL)
        killed.popen.stdin.close()  # its cat lives on, and ends now
        killed.wait()
        young, old = tmp_path / "hookd-run-young", tmp_path / "hookd-other"
        for directory in (young, old):
            directory.mkdir()
        for directory in {*tmp_path.glob("hookd-*")} - {young}:
            os.utime(directory, (0, 0))
        with run("true") as process:
            process.finish()
        assert len({*tmp_path.glob("hookd-*")} - {young, old}) == 1
        assert {young, old} <= {*tmp_path.glob("hookd-*")}
        alive.popen.stdin.close()
        assert alive.wait() == 0
