"""`hookd run`'s ground: the environment of a command, and how the command runs in it."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import zipfile
from typing import TYPE_CHECKING

import pytest

from hookd.errors import UsageError
from hookd.tool.attach import command, environment, launch
from hookd.tool.attach.request import AttachRequest
from hookd.tool.linux import commandline
from tests.support import stub
from tests.support.environment import REPOSITORY, bare_python, target_environment, tool_environment
from tests.support.processes import PATIENCE_S, Process, wait_until
from tests.support.tool import start_hookd

if TYPE_CHECKING:
    from pathlib import Path


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
        """Return method, parent, whether torch was there, and multiprocessing's name, by pid."""
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


@pytest.mark.parametrize(
    "looks",
    ["find_spec('torch')", "module_from_spec(find_spec('torch'))", "find_spec('torch'); find_spec('torch')"],
)
def test_who_looks_whether_torch_is_there_does_not_import_it(launched, looks):
    program = f"""
import importlib.util, sys
from importlib.util import find_spec, module_from_spec
kept = find_spec('torch').loader
{looks}
assert not [name for name in sys.modules if name.startswith('torch')]
import torch
assert not [finder for finder in sys.meta_path if 'sitecustomize' in type(finder).__module__]
assert 'exec_module' not in vars(torch.__loader__) and 'exec_module' not in vars(kept)
"""
    with launched.run(program) as process:
        process.finish()
        assert process.err == []
        assert list(launched.marks()) == [process.pid]


def test_torch_in_an_archive_is_seen_among_its_other_modules(launched):
    with zipfile.ZipFile(launched.directory / "all.zip", "w") as archive:
        archive.writestr("other.py", "")
        archive.writestr("torch/__init__.py", "import torch.nn")
        archive.writestr("torch/nn.py", "")
    program = """
import importlib.util, sys
sys.path.insert(0, 'all.zip')
importlib.util.find_spec('torch')
import other
import torch
assert 'exec_module' not in vars(torch.__loader__)
"""
    with launched.run(program) as process:
        process.finish()
        assert process.err == []
        assert len(launched.marks()) == 1


def test_an_import_of_torch_that_failed_may_be_tried_again(launched):
    (launched.directory / "stub" / "torch" / "__init__.py").write_text(
        "import sys\nif not hasattr(sys, 'again'):\n    raise ImportError('not yet')\nfrom torch import nn\n"
    )
    program = """
import sys
try:
    import torch
except ImportError as exc:
    sys.again = str(exc)
import torch
print(sys.again)
"""
    with launched.run(program) as process:
        assert process.finish() == ["not yet"]
        assert len(launched.marks()) == 1


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


def test_a_sitecustomize_of_the_user_that_exits_shows_one_line_of_ours(launched):
    there = launched.directory / "theirs"
    there.mkdir()
    (there / "sitecustomize.py").write_text("import sys\nsys.exit(9)\n")
    base = launched.launch.env["PYTHONPATH"]
    errors = []
    for path in (str(there), os.pathsep.join([base, str(there)])):
        with launched.run("print('ran')", PYTHONPATH=path) as process:
            assert process.wait() == 1
            assert process.out == []
            errors.append(process.err)
    ours = [i for i, line in enumerate(errors[1]) if "hookd" in line]
    assert len(ours) == 1, errors[1]
    assert errors[1][ours[0] + 1].strip() == "import sitecustomize"
    del errors[1][ours[0] : ours[0] + 2]
    assert errors[1] == errors[0]


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


LAUNCHERS = [
    "-m torch.distributed.run",
    "-u -X faulthandler -m torch.distributed.run",
    "-mtorch.distributed.run",
    "-um torch.distributed.launch",
    "-uXdev -X dev -W ignore -Wdefault /opt/bin/torchrun train.py",
    "-m deepspeed.launcher.runner",
    "-m accelerate.commands.accelerate_cli launch",
    "--check-hash-based-pycs never /usr/bin/accelerate launch",
    "/opt/site-packages/torch/distributed/run.py",
    "-- torchrun",
]
PROGRAMS = [
    "train.py torchrun",
    "-c torchrun",
    "-cimport torch.distributed.run",
    "- torchrun",
    "-m pkg.train -m torch.distributed.run",
    "-X torchrun train.py",
    "deepspeed/train.py",
    "",
    "-mtimeit -s torchrun",
]


@pytest.mark.parametrize("words", LAUNCHERS)
def test_a_launcher_is_recognized_by_its_command_line(words):
    assert commandline.is_launcher(["python", *words.split(" ")])


@pytest.mark.parametrize("words", PROGRAMS)
def test_a_program_is_no_launcher(words):
    assert not commandline.is_launcher(["python", *words.split(" ")])


def test_the_process_itself_is_asked_with_the_options_of_its_interpreter(launched):
    package = launched.directory / "stub" / "torch" / "distributed"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "run.py").write_text("import torch; print('ran')")
    with launched.run("", "-u", "-X", "faulthandler", "-W", "ignore", "-m", "torch.distributed.run") as process:
        assert process.finish() == ["ran"]
    assert launched.marks() == {}


def test_disabled_means_disabled(launched):
    with launched.run("import torch", HOOKD_DISABLE="1") as process:
        process.finish()
    assert launched.marks() == {}


def test_an_agent_that_fails_does_not_disturb_the_program_and_is_reported_to_the_tool(launched):
    (launched.launch.directory / "payload").write_bytes(b"none")
    with launched.run("import torch; print('ran')") as process:
        assert process.finish() == ["ran"]
        assert process.err == []
        assert list(launched.launch.failures()) == [process.pid]


RUN = """
import sys
from hookd.tool.attach import AttachRequest, command
command.run(sys.argv[1:], AttachRequest(plugins=()))
"""


def started(*command: str, stdin: bool = False) -> Process:
    environment = tool_environment()
    return Process([sys.executable, "-c", RUN, *command], env=environment, cwd=REPOSITORY, stdin=stdin)


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_exit_code_is_the_commands(code):
    with started("sh", "-c", f"exit {code}") as process:
        assert process.wait() == code


def test_a_signal_that_ends_the_command_is_seen_by_who_waits():
    with started("sh", "-c", "kill -KILL $$") as process:
        assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("ignored", "names"),
    [("", {"SIGINT"}), ("CHLD", {"SIGINT", "SIGCHLD"}), ("CHLD HUP USR1", {"SIGINT", "SIGCHLD", "SIGHUP", "SIGUSR1"})],
)
def test_what_the_parent_ignores_is_ignored_and_nothing_else(ignored, names):
    """SIGINT and the others; SIGPIPE, which Python ignores for itself, not."""
    hookd = shlex.join([sys.executable, "-c", RUN])
    script = f"trap '' INT {ignored}; {hookd} grep -E '^Sig(Ign|Blk)' /proc/self/status; exit 3"
    with Process(["bash", "-c", script], env=tool_environment(), cwd=REPOSITORY) as process:
        assert process.wait() == 3, process.describe()
        blocked, found = (int(line.partition(":")[2], 16) for line in process.out)
    assert blocked == 0
    assert {signal.Signals(n).name for n in range(1, 32) if found >> n - 1 & 1} == names


def test_the_command_has_no_child_that_it_did_not_start():
    program = "import os\ntry:\n    os.wait()\nexcept ChildProcessError:\n    print('none', flush=True)"
    with started(sys.executable, "-c", program) as process:
        assert process.finish() == ["none"]


def test_it_is_the_command_itself_that_runs_under_the_pid():
    with started("sh", "-c", "echo $$ $(ps -o pgid= -o sid= $$)") as process:
        assert process.finish() == [f"{process.pid} {os.getpgid(0)} {os.getsid(0)}"]


def test_who_reads_to_the_end_need_not_wait_for_longer_than_the_command_runs():
    """The companion lives as long as the command, and has closed all descriptors that are not its own."""
    reads, writes = os.pipe()
    other_reads, other_writes = os.pipe()
    command = [sys.executable, "-c", RUN, "bash", "-c", f"exec >&- {other_writes}>&-; read line"]
    with subprocess.Popen(
        command, env=tool_environment(), cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=writes, pass_fds=[other_writes]
    ) as process:
        os.close(writes)
        os.close(other_writes)
        try:
            for end in (reads, other_reads):
                assert select.select([end], [], [], PATIENCE_S)[0]
                assert os.read(end, 1) == b""
            assert process.poll() is None
        finally:
            process.stdin.close()
            process.wait(PATIENCE_S)
            os.close(reads)
            os.close(other_reads)


def test_closed_standard_streams_stay_closed(tmp_path):
    words = [sys.executable, "-c", "import os; print([n for n in range(20) if os.path.exists(f'/proc/self/fd/{n}')])"]
    outputs = []
    for command_ in (words, [sys.executable, "-c", RUN, *words]):
        script = f"{shlex.join(command_)} <&- 2>&-; echo status $?"
        with Process(["bash", "-c", script], env=tool_environment(TMPDIR=tmp_path), cwd=REPOSITORY) as process:
            outputs.append(process.finish())
    assert outputs[0] == outputs[1] == [outputs[0][0], "status 0"]
    wait_until(lambda: not list(tmp_path.glob("hookd-*")))


def test_the_end_is_seen_without_a_pidfd():
    with Process(["cat"], env=target_environment(), stdin=True) as process:
        seen = command._Command(process.pid)
        os.close(seen.pidfd)
        seen.pidfd = -1
        waiting = threading.Thread(target=seen.wait)
        waiting.start()
        process.popen.stdin.close()
        waiting.join(PATIENCE_S)  # a zombie by then: nobody has asked for its status
        assert not waiting.is_alive()


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


def test_what_python_adds_to_its_own_environment_is_not_passed_on():
    """LC_CTYPE, in the C locale (PEP 538)."""
    environment = {key: value for key, value in tool_environment().items() if key not in ("LANG", "LC_ALL", "LC_CTYPE")}
    with Process([sys.executable, "-c", RUN, "env"], env=environment, cwd=REPOSITORY) as process:
        assert not [line for line in process.finish() if line.startswith("LC_CTYPE=")]


SIGNALS = [int(number) for number in sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})]
TELLS = """
import os, signal, time
def on_signal(number, frame):
    os.write(1, b'got %d\\n' % number)
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, on_signal)
print('ready', flush=True)
while True:
    time.sleep(0.02)  # pause() would wait on where a signal has come just before it
"""


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["alone", "group"])
def test_each_signal_reaches_the_command_once(send):
    """A group's signal reaches it by the group: `kill -- -PGID`, timeout, Ctrl-C."""
    hookd = ["setsid", sys.executable, "-c", RUN, sys.executable, "-c", TELLS]
    with Process(hookd, env=tool_environment(), cwd=REPOSITORY) as process:
        process.expect("^ready$")
        for number in SIGNALS:
            send(process.pid, number)
            process.expect(f"^got {number}$")
        send(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert process.out == ["ready", *(f"got {number}" for number in SIGNALS)]


def test_a_signal_to_all_that_there_is_ends_the_command_first(tmp_path):
    """Like a signal from systemd or a job manager: to every process of a cgroup, the companion too."""
    with Process(
        [sys.executable, "-c", RUN, "cat"], env=tool_environment(TMPDIR=tmp_path), cwd=REPOSITORY, stdin=True
    ) as process:
        process.ask("runs", "^runs$")  # who has made the companion is gone then
        (directory,) = tmp_path.glob("hookd-*/site/sitecustomize.py")
        companion = companions(directory.parents[1])
        assert len(companion) == 1
        for pid in companion:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        process.send("through")
        process.expect("^through$")
        assert companions(directory.parents[1]) == companion
        process.signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    wait_until(lambda: not list(tmp_path.glob("hookd-*")))


def companions(directory: Path) -> set[int]:
    """Return the processes that have a command's directory open."""
    found = set()
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == str(directory):
                found.add(int(link.split("/")[2]))
    return found


def test_a_script_that_does_not_say_who_runs_it_is_run_by_the_shell(tmp_path):
    script = tmp_path / "script.sh"
    script.write_text("echo ran $0 $1\n")
    script.chmod(0o755)
    with started(str(script), "x") as process:
        assert process.finish() == [f"ran {script} x"]


@pytest.mark.parametrize(
    ("kind", "said"), [("binary", "Exec format"), ("plain", "Permission"), ("directory", "directory")]
)
def test_what_cannot_be_run_is_reported(tmp_path, kind, said):
    path = tmp_path / "thing"
    if kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"\x7fELF\0\0")
        path.chmod(0o755 if kind == "binary" else 0o644)
    with start_hookd("run", "--", path, TMPDIR=tmp_path) as process:
        assert process.wait() == 2
        assert not [line for line in process.err if "imported torch" in line]
        assert any(line.startswith(f"hookd: error: cannot run {path}: ") and said in line for line in process.err)
    wait_until(lambda: not list(tmp_path.glob("hookd-*")))


def test_a_colon_in_the_name_of_the_temporary_directory(tmp_path):
    odd = tmp_path / "a:b"
    odd.mkdir()
    with Process([sys.executable, "-c", RUN, "env"], env=tool_environment(TMPDIR=odd), cwd=REPOSITORY) as process:
        (path,) = (line.removeprefix("PYTHONPATH=") for line in process.finish() if line.startswith("PYTHONPATH="))
    assert launch.is_launched({"PYTHONPATH": path})
    assert str(odd) not in path
    assert not list(odd.iterdir())


def test_without_any_place_for_its_directory_it_says_so(monkeypatch):
    monkeypatch.setattr(launch, "_places", lambda: iter(["/proc"]))
    with pytest.raises(UsageError) as caught:
        command.run(["true"], AttachRequest(plugins=()))
    assert caught.value.reason == "no-directory"
    assert "TMPDIR" in caught.value.hint


def test_a_command_that_is_not_there():
    with pytest.raises(UsageError) as caught:
        command.run(["no-such-command-here"], AttachRequest(plugins=()))
    assert caught.value.reason == "command-not-found"


def test_nothing_is_left_when_the_command_has_ended(tmp_path):
    with Process([sys.executable, "-c", RUN, "true"], env=tool_environment(TMPDIR=tmp_path), cwd=REPOSITORY) as process:
        process.finish()
    wait_until(lambda: not list(tmp_path.glob("hookd-*")))


def test_what_a_killed_one_has_left_is_removed_by_the_next(tmp_path):
    def run(*command, stdin=False):
        command, environment = [sys.executable, "-c", RUN, *command], tool_environment(TMPDIR=tmp_path)
        return Process(command, env=environment, cwd=REPOSITORY, stdin=stdin)

    with run("cat", stdin=True) as first, run("cat", stdin=True) as alive:
        for process in (first, alive):
            process.ask("runs", "^runs$")
        sites = list(tmp_path.glob("hookd-*/site/*.py"))
        (directory,) = (
            site.parents[1] for site in sites if str(site.parent) in environment.of(first.pid)["PYTHONPATH"]
        )
        (companion,) = companions(directory)
        os.kill(companion, signal.SIGKILL)
        first.popen.stdin.close()
        assert first.wait() == 0
        young, old = tmp_path / "hookd-run-young", tmp_path / "hookd-other"
        for directory in (young, old):
            directory.mkdir()
        for directory in {*tmp_path.glob("hookd-*")} - {young}:
            os.utime(directory, (0, 0))
        with run("true") as process:
            process.finish()
        # What it has made itself is removed by its companion, after its end.
        wait_until(
            lambda: len({*tmp_path.glob("hookd-*")} - {young, old}) == 1, what="the end of all but the one alive"
        )
        assert {young, old} <= {*tmp_path.glob("hookd-*")}
        alive.popen.stdin.close()
        assert alive.wait() == 0


def test_a_process_that_is_not_observed_is_reported_while_it_runs():
    program = "import torch, sys; print('ready', flush=True); sys.stdin.readline()"
    words = ["run", "-p", "nan:recorder=-1", "--listen", "127.0.0.1:0", "--", bare_python(), "-c", program]
    with start_hookd(*words, stdin=True) as process:
        pid = process.pid
        process.expect(f"^hookd: process {pid} is not observed: PluginError: nan: recorder must be at least 0")
        process.send("")
        process.finish()
        assert sum("is not observed" in line for line in process.err) == 1
