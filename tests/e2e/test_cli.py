"""The console script on real processes: exit codes, JSON, messages that say what to do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hookd.tool.attach.discover import find_page
from hookd.tool.linux.owner import user_name
from tests.support import forked, outputs, stub
from tests.support.environment import REPOSITORY, bare_python, target_environment, tool_environment
from tests.support.listener import listening
from tests.support.processes import Process, wait_until
from tests.support.tool import script_of, start_hookd
from tests.support.training import paced_example

if TYPE_CHECKING:
    from collections.abc import Iterator

TRAIN = REPOSITORY / "examples" / "train.py"
CONSOLE = Path(sys.executable).with_name("hookd")
USER = user_name(os.getuid())
NO_SUCH_PID = "4194305"  # above the kernel's largest pid

pytestmark = pytest.mark.skipif(not CONSOLE.exists(), reason="hookd is not installed here")


def hookd(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    with start_hookd(*words, **variables) as process:
        status = process.wait()
    out, err = ("".join(f"{line}\n" for line in lines) for lines in (process.out, process.err))
    outputs.check(words, out)
    return subprocess.CompletedProcess(process.command, status, out, err)


@contextlib.contextmanager
def started(directory: Path) -> Iterator[Process]:
    with Process([bare_python(), paced_example(directory)], env=target_environment(), popen=forked.start) as process:
        process.expect(r"^step 3 ")
        yield process


@pytest.fixture(scope="module")
def shared_training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with started(tmp_path_factory.mktemp("shared")) as process:
        yield process


@pytest.fixture
def training(shared_training: Process) -> Iterator[Process]:
    """Return a training process that tests share; at the beginning of each test it has no agent."""
    yield shared_training
    if find_page(shared_training.pid) is not None:
        hookd("detach", str(shared_training.pid))


@pytest.fixture
def own_training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Return a training process that the test may end."""
    with started(tmp_path_factory.mktemp("own")) as process:
        yield process


@pytest.fixture
def idle() -> Iterator[Process]:
    """A Python without torch."""
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    with Process([bare_python(), "-c", code], env=target_environment(), stdin=True) as process:
        process.expect("ready")
        yield process


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[str, Process]]:
    """`hookd serve` on a socket of its own, as the value of --host."""
    control = tmp_path / "control.sock"
    words = ("serve", "--listen", "127.0.0.1:0", "--control", control, "--state-dir", tmp_path / "state")
    with start_hookd(*words) as process:
        process.expect(r"http://127\.0\.0\.1:[1-9]\d*")
        yield f"unix://{control}", process


# ---- wrong arguments


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["ps", "--nonsense"],
        ["attach"],
        ["attach", "one"],
        ["attach", "--tree"],
        ["attach", "1", "-p", "NaN!"],
        ["attach", "1", "-p", "nan", "-p", "nan:every=2"],
        ["attach", "1", "--timeout", "0"],
        ["attach", "1", "--listen", "nowhere"],
        ["detach"],
        ["detach", "1", "--all"],
        ["report"],
        ["ps", "--host", "unix:///x"],
        ["status", "--host", "tcp://x:1"],
        ["run"],
        ["config", "check", "/nonexistent.toml"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2_and_says_what_to_do(words):
    done = hookd(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("hookd: error: ")
    assert not done.stdout


def test_wrong_usage_with_json_is_an_object_on_stdout():
    done = hookd("attach", "--json", "one")
    assert done.returncode == 2
    assert json.loads(done.stdout)["reason"] == "usage"


def test_json_after_two_dashes_is_not_ours():
    done = hookd("run", "--nonsense", "--", "true", "--json")
    assert done.returncode == 2
    assert not done.stdout


def test_no_words_print_the_help_and_exit_2():
    done = hookd()
    assert done.returncode == 2
    assert "hookd attach PID" in done.stdout + done.stderr


def test_every_command_has_help(capsys):
    from hookd.tool.cli import COMMANDS, main

    listed = hookd("--help")
    assert "..." not in listed.stdout.partition("Commands:")[2]  # no summary is cut at 80 columns
    assert listed.returncode == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\S", listed.stdout, re.MULTILINE), f"{name} is not in the help"
        assert main([name, "--help"]) == 0  # in this process: twenty processes would differ only in their last argument
        assert f"Usage: hookd {name} " in capsys.readouterr().out


def test_version():
    from hookd import __version__

    assert hookd("version").stdout.startswith(f"hookd {__version__} ")
    assert json.loads(hookd("version", "--json").stdout)["hookd"] == __version__
    assert __version__ in hookd("--version").stdout


# ---- no daemon, no target


@pytest.mark.parametrize("words", [["status"], ["attach", "1"], ["detach", "1"], ["report", "1"]], ids=" ".join)
def test_a_named_daemon_that_does_not_answer_exits_3(words, tmp_path):
    done = hookd(*words, "--json", "--host", f"unix://{tmp_path}/none.sock")
    assert done.returncode == 3
    assert json.loads(done.stdout)["reason"] == "daemon-not-running"
    assert "hookd serve" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value"), [("HOOKD_CONTROL", "{}/none.sock"), ("HOOKD_HOST", "unix://{}/none.sock")]
)
def test_a_daemon_that_is_named_in_the_environment_and_not_there_names_the_variable(variable, value, tmp_path):
    done = hookd("attach", "1", **{variable: value.format(tmp_path)})
    assert done.returncode == 3
    assert f"hint: {variable} names this socket" in done.stderr
    assert "`hookd serve`" in done.stderr


@pytest.mark.parametrize("command", ["attach", "detach", "report"])
def test_a_process_that_does_not_exist_exits_4(command):
    done = hookd(command, NO_SUCH_PID, "--json")
    assert done.returncode == 4
    assert json.loads(done.stdout)["reason"] == "no-such-process"


@pytest.mark.parametrize("command", ["detach", "report"])
def test_a_process_without_an_agent_exits_4(command, idle):
    done = hookd(command, str(idle.pid), "--json")
    assert done.returncode == 4
    assert json.loads(done.stdout)["reason"] == "not-attached"


def test_a_detach_of_what_is_not_attached_says_that_nothing_has_to_be_done(idle, daemon):
    for words in ([], ["--host", daemon[0]]):
        done = hookd("detach", str(idle.pid), *words)
        assert done.returncode == 4
        assert "hint: Nothing to do" in done.stderr
        assert "hookd attach" not in done.stderr


def test_a_tree_without_a_training_process_exits_4(idle):
    done = hookd("attach", "--tree", str(idle.pid), "--timeout", "2", "--json")
    assert done.returncode == 4
    assert json.loads(done.stdout)["reason"] == "no-match"
    assert f"waiting for {idle.pid} to load torch" in done.stderr
    assert f"skipped {idle.pid}: it has not loaded torch" in done.stderr


def test_a_process_without_torch_exits_6_and_lives_on(idle):
    done = hookd("attach", str(idle.pid), "--listen", "127.0.0.1:0", "--json")
    assert done.returncode == 6
    answer = json.loads(done.stdout)
    assert answer["reason"] == "no-torch"
    assert answer["targets"][0]["pid"] == idle.pid
    assert idle.popen.poll() is None


def test_an_unknown_plugin_exits_2_and_names_those_that_exist(training):
    done = hookd("attach", str(training.pid), "--listen", "127.0.0.1:0", "-p", "nam", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["reason"] == "unknown-plugin"
    assert "timing" in done.stderr


def test_another_users_process_exits_5(idle, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    nobody = 65534
    words = [CONSOLE, "attach", str(idle.pid), "--listen", "127.0.0.1:0", "--json"]
    try:
        env = tool_environment(HOME=tmp_path, XDG_RUNTIME_DIR="", TMPDIR="/tmp")
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, user=nobody, env=env, check=False)
    except PermissionError:
        pytest.skip("another user cannot run this interpreter")
    if done.returncode == 126 or "Permission denied" in done.stderr:
        pytest.skip("another user cannot run this interpreter")
    assert done.returncode == 5, done.stderr
    assert json.loads(done.stdout)["reason"] == "other-user"


# ---- the foreground


def agent_check(pid: int, **variables: str) -> str:
    """Return what `doctor` reports about the agent in a process."""
    checks = json.loads(hookd("doctor", str(pid), "--json", **variables).stdout)["checks"]
    return next(check["found"] for check in checks if check["name"] == "agent")


def attach(*words: str | int) -> Process:
    return start_hookd("attach", *map(str, words), "--listen", "127.0.0.1:0", "--json")


def answer_of(process: Process) -> dict:
    """Wait for the JSON object that a running `attach` prints."""

    def parse() -> dict | None:
        try:
            return json.loads("\n".join(process.out))
        except json.JSONDecodeError:
            assert process.popen.poll() is None, process.describe()
            return None

    return wait_until(parse, what="the answer of attach")


def test_the_whole_way_in_the_foreground(training):
    with attach(training.pid) as watching:
        answer = answer_of(watching)
        target = answer["targets"][0]
        assert (target["pid"], target["rank"], script_of(target["run"])) == (training.pid, "0", "train.py")
        with urllib.request.urlopen(answer["metrics"], timeout=60) as metrics:
            assert f'hookd_target_up{{rank="0",run="{target["run"]}"}} 1.0' in metrics.read().decode()

        listed = {row["pid"]: row["state"] for row in json.loads(hookd("ps", "--json").stdout)["processes"]}
        assert listed[training.pid] == "attached"
        lines = hookd("ps").stdout.split("\n")
        line = next(line for line in lines if line.split()[:1] == [str(training.pid)])
        assert re.search(r" python\d?[.\d]* \S*/train\.py\b", line)

        def seen() -> dict | None:
            report = json.loads(hookd("report", str(training.pid), "--json").stdout)
            names = {module["name"] for module in report["modules"]}  # a few more at each step, until all are learnt
            return report if report["step"]["counted"] > 2 and "blocks.1.attention.qkv" in names else None

        report = wait_until(seen, what="counted steps, and a module")
        assert report["pid"] == training.pid
        output = hookd("report", str(training.pid)).stdout
        assert "incidents: none" in output
        assert re.search(r"qkv +Linear +\d+ +[\d.]+ [mµ]s", output)

        rows = json.loads(hookd("status", "--json").stdout)["targets"]
        row = next(row for row in rows if row["pid"] == training.pid)
        assert row["state"] == "running"
        assert row["step_seconds"] > 0
        assert "train.py" in hookd("status").stdout

        watching.signal(signal.SIGINT)
        assert watching.wait() == 0, watching.describe()
        assert "nn.Module.__call__ is the original again" in "\n".join(watching.err)
    assert hookd("report", str(training.pid)).returncode == 4
    training.expect(r"^step ", after=len(training.out))


@pytest.mark.load
def test_the_last_words_of_a_killed_process_can_be_read_while_a_foreground_attach_serves_them(own_training):
    with attach(own_training.pid, "-p", "timing") as watching:
        answer_of(watching)
        wait_until(lambda: json.loads(hookd("report", str(own_training.pid), "--json").stdout)["step"]["counted"] > 2)
        own_training.signal(signal.SIGKILL)
        own_training.wait()
        watching.expect(rf"^process {own_training.pid} was killed by SIGKILL")
        done = hookd("report", str(own_training.pid))
        assert done.returncode == 0, done.stderr
        assert re.search(r"^lost \(signal SIGKILL\), \d+ steps? done", done.stdout, re.MULTILINE)
        assert re.search(r"qkv +Linear +\d+ +[\d.]+ [mµ]s", done.stdout)
        row = next(
            row for row in json.loads(hookd("status", "--json").stdout)["targets"] if row["pid"] == own_training.pid
        )
        assert row["state"] == "lost"
        assert row["step"]["counted"] > 2
        assert watching.pid in [one["pid"] for one in row["served_by"]]
        assert re.search(rf"^ *{own_training.pid} +train\.py +0 +lost ", hookd("status").stdout, re.MULTILINE)
    assert hookd("report", str(own_training.pid)).returncode == 4
    assert own_training.pid not in [row["pid"] for row in json.loads(hookd("status", "--json").stdout)["targets"]]


def test_detach_ends_what_a_foreground_attach_holds(training):
    with attach(training.pid) as watching:
        answer_of(watching)
        done = hookd("detach", str(training.pid), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["targets"][0]["restored"] == "identity"
        watching.expect("was detached")
        watching.signal(signal.SIGINT)
        assert watching.wait() == 0, watching.describe()
    training.expect(r"^step ", after=len(training.out))


@pytest.mark.load
def test_keep_leaves_the_agent_and_detach_all_finds_it(training):
    with attach(training.pid, "--keep") as watching:
        answer_of(watching)
        watching.signal(signal.SIGINT)
        assert watching.wait() == 0, watching.describe()
        assert f"the agent stays in {training.pid}; `hookd detach {training.pid}` ends it" in watching.err
    assert hookd("report", str(training.pid), "--json").returncode == 0
    assert "kept until detached" in agent_check(training.pid)
    assert hookd("detach", str(training.pid)).returncode == 0
    assert hookd("detach", str(training.pid)).returncode == 4


def test_of_several_processes_the_worst_decides_the_exit_code(training, idle):
    with attach(training.pid, idle.pid) as watching:
        answer = answer_of(watching)
        assert [target["pid"] for target in answer["targets"]] == [training.pid, idle.pid]
        assert "error" not in answer["targets"][0]
        assert answer["reason"] == answer["targets"][1]["reason"] == "no-torch"
        watching.signal(signal.SIGINT)
        assert watching.wait() == 6, watching.describe()
    assert hookd("report", str(training.pid)).returncode == 4


@pytest.mark.load
def test_tree_finds_the_children_that_train():
    # One shell in between: the shell is not a training process, its child is.
    with Process(["sh", "-c", f"'{bare_python()}' '{TRAIN}' & wait"], env=target_environment()) as launcher:
        launcher.expect(r"^step 3 ")
        with attach("--tree", launcher.pid) as watching:
            targets = answer_of(watching)["targets"]
            assert [script_of(target["run"]) for target in targets] == ["train.py"]
            watching.signal(signal.SIGINT)
            assert watching.wait() == 0, watching.describe()
        os.kill(targets[0]["pid"], signal.SIGTERM)
        launcher.wait()


def test_tree_waits_for_children_that_have_not_loaded_torch_yet(tmp_path):
    go = tmp_path / "go"
    code = (
        f"import os, runpy, sys, time; print('here', flush=True)\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
        f"sys.argv = [{str(TRAIN)!r}]; runpy.run_path({str(TRAIN)!r}, run_name='__main__')"
    )
    script = tmp_path / "late.py"
    script.write_text(code)
    with Process(["sh", "-c", f"'{bare_python()}' '{script}' & wait"], env=target_environment()) as launcher:
        launcher.expect("here")
        with attach("--tree", launcher.pid, "--timeout", "60") as watching:
            late = watching.expect(r"^waiting for (\d+) to load torch$")[1]
            go.touch()
            assert [target["pid"] for target in answer_of(watching)["targets"]] == [int(late)]
            watching.signal(signal.SIGINT)
            assert watching.wait() == 0, watching.describe()
        os.kill(int(late), signal.SIGTERM)
        launcher.wait()


def test_an_attach_that_takes_long_says_what_it_waits_for(tmp_path, daemon):
    with stub.start(tmp_path, "print('ready', flush=True)\nctypes.CDLL(None).pause()") as target:
        for words in (["--listen", "127.0.0.1:0"], ["--host", daemon[0]]):
            done = hookd("attach", str(target.pid), "--timeout", "4", *words, "--json")
            assert json.loads(done.stdout)["reason"] == "blocked", done.stderr
            line = f"waiting for {target.pid} to reach the interpreter, at most 4 s (--timeout)"
            assert done.stderr.split("\n")[0] == line


def test_match_picks_by_the_command_line(training):
    mark = str(training.command[1])
    with attach("--match", mark, "--user", str(os.getuid())) as watching:
        assert training.pid in [target["pid"] for target in answer_of(watching)["targets"]]
        watching.signal(signal.SIGINT)
        assert watching.wait() == 0, watching.describe()
    assert hookd("attach", "--match", "no such words", "--json").returncode == 4
    other = hookd("attach", "--match", mark, "--user", "20001", "--json")
    assert (other.returncode, json.loads(other.stdout)["reason"]) == (4, "no-match")
    assert hookd("attach", "--user", "20001", "1").returncode == 2


# ---- the daemon


def test_the_whole_way_through_a_daemon(training, daemon):
    host, process = daemon
    done = hookd("attach", str(training.pid), "--host", host, "--timeout", "120", "--json")
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)["targets"][0]["run"]
    assert script_of(run) == "train.py"

    status = json.loads(hookd("status", "--json", "--host", host).stdout)
    assert status["daemon"]["pid"] == process.pid
    url = status["daemon"]["url"]
    assert f"held by hookd serve {process.pid} ({url})" in agent_check(training.pid, HOOKD_HOST=host)
    assert f"held by hookd serve {process.pid}" in agent_check(training.pid)
    process.expect(
        rf"^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ hookd INFO: attached to process {training.pid} of user {USER} as asked: "
        rf"run {re.escape(run)}, rank 0, for user {USER} \(process \d+\); plugins nan \S+, timing "
    )
    assert [row["pid"] for row in status["targets"] if row["run"] == run] == [training.pid], status["targets"]
    assert run in hookd("status", HOOKD_HOST=host).stdout
    assert json.loads(hookd("report", str(training.pid), "--json", "--host", host).stdout)["pid"] == training.pid

    done = hookd("detach", str(training.pid), "--host", host)
    assert done.returncode == 0, done.stderr
    process.expect(
        rf"detached from process {training.pid} of user {USER} as asked: run {re.escape(run)}, rank 0, "
        rf"for user {USER} \(process \d+\)"
    )
    assert "the original again" in done.stderr
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.describe()


def test_the_daemons_refusal_keeps_its_exit_code_and_reason(idle, daemon):
    done = hookd("attach", str(idle.pid), "--host", daemon[0], "--json")
    assert done.returncode == 6
    assert json.loads(done.stdout)["reason"] == "no-torch"


def test_a_second_daemon_on_the_same_socket_says_so(daemon):
    control = daemon[0].removeprefix("unix://")
    done = hookd("serve", "--listen", "127.0.0.1:0", "--control", control)
    assert done.returncode == 1
    assert "another daemon answers" in done.stderr


# ---- the rest


def test_plugin_list_names_ours_and_those_of_a_directory(tmp_path):
    (tmp_path / "widths.py").write_text(
        "from hookd import Plugin\nclass Widths(Plugin):\n    '''Counts.'''\n    name = 'widths'\n    mutates = True\n"
    )
    rows = json.loads(hookd("plugin", "list", "--plugin-dir", tmp_path, "--json").stdout)["plugins"]
    found = {row["name"]: row for row in rows}
    assert {"nan", "timing", "activations", "gradclip", "widths"} <= set(found)
    assert found["nan"]["is_default"]
    assert not found["nan"]["mutates"]
    assert found["gradclip"]["mutates"]
    assert len(found["widths"].pop("sha256")) == 64
    assert found["widths"] == {
        "name": "widths", "entry": "widths:Widths", "summary": "Counts.", "mutates": True, "is_default": False,
        "version": "", "origin": str(tmp_path / "widths.py"),
    }  # fmt: skip
    assert "gradclip" in hookd("plugin", "list").stdout


def test_plugin_list_names_a_broken_file_and_lists_the_others(tmp_path):
    (tmp_path / "broken.py").write_text("import os\n\ndef (\n")
    (tmp_path / "widths.py").write_text("from hookd import Plugin\nclass Widths(Plugin):\n    name = 'widths'\n")
    done = hookd("plugin", "list", "--plugin-dir", tmp_path, "--json")
    assert done.returncode == 2
    answer = json.loads(done.stdout)
    assert {"nan", "widths"} <= {row["name"] for row in answer["plugins"]}
    assert f"{tmp_path}/broken.py:3: not valid Python" in answer["unreadable"][0]["error"]
    assert f"{tmp_path}/broken.py:3" in done.stderr


@pytest.mark.parametrize("words", [["attach", "foo"], ["detach", "foo"], ["report", "0"], ["doctor", "-p"]])
def test_what_is_no_pid_is_called_so(words):
    done = hookd(*words)
    assert done.returncode == 2
    assert "Invalid value" not in done.stderr
    assert words == ["doctor", "-p"] or f"'{words[1]}' is not a process id; `hookd ps`" in done.stderr


def test_status_names_the_foreground_attach_that_holds_and_serves_a_target(training):
    with attach(training.pid, "-p", "timing") as watching:
        answer = answer_of(watching)
        status = json.loads(hookd("status", "--json").stdout)
        row = next(row for row in status["targets"] if row["pid"] == training.pid)
        assert watching.pid in row["held_by"]
        assert [one["url"] + "/metrics" for one in row["served_by"] if one["pid"] == watching.pid] == [
            answer["metrics"]
        ]
        done = hookd("status")
        assert f"hookd attach (process {watching.pid}): {answer['metrics']} serves {training.pid}" in done.stderr
        lines = done.stdout.split("\n")
        assert max(map(len, lines)) <= 80, lines
        if any(line.split()[4:5] and line.split()[4].endswith("*") for line in lines):
            assert "* counted from the attach" in done.stdout
        lines = hookd("report", str(training.pid)).stdout.split("\n")
        assert max(map(len, lines)) <= 80, lines


@pytest.mark.load
def test_an_address_that_is_taken_names_who_is_there_and_gives_the_whole_command(training):
    with attach(training.pid, "-p", "timing") as watching:
        address = answer_of(watching)["metrics"].split("/")[2]
        done = hookd("attach", str(training.pid), "-p", "timing", HOOKD_LISTEN=address)
        assert done.returncode == 1
        taken = f"cannot listen on {address} (Address already in use): hookd attach {watching.pid} serves there"
        assert done.stderr.split("\n")[:2] == [
            f"hookd: error: {taken}",
            f"hint: hookd attach --listen 127.0.0.1:0 {training.pid} -p timing",
        ]
        done = hookd("attach", str(training.pid), "--listen", address)
        assert done.stderr.split("\n")[:2] == [
            f"hookd: error: {taken}",
            "hint: Choose another with --listen, port 0 for any.",
        ]


def test_an_address_that_is_taken_by_a_daemon_names_it(daemon, tmp_path):
    host, process = daemon
    address = json.loads(hookd("status", "--json", "--host", host).stdout)["daemon"]["url"].split("/")[2]
    words = ("serve", "--state-dir", tmp_path / "other", "--control", tmp_path / "other.sock")
    done = hookd(*words, HOOKD_HOST=host, HOOKD_LISTEN=address)
    assert done.returncode == 1
    assert f"(Address already in use): hookd serve {process.pid} serves there" in done.stderr
    assert "hint: hookd serve --listen 127.0.0.1:0 --state-dir" in done.stderr


def test_an_address_that_is_taken_by_another_program_names_it(tmp_path):
    with listening() as (pid, port):
        address = f"127.0.0.1:{port}"
        done = hookd("serve", "--listen", address, "--state-dir", tmp_path, "--control", tmp_path / "control.sock")
    assert done.returncode == 1
    message, hint, *_ = done.stderr.split("\n")
    assert message.startswith(
        f"hookd: error: cannot listen on {address} (Address already in use): process {pid} of user {USER} "
    )
    assert message.endswith(") listens there")
    assert hint == "hint: Choose another with --listen, port 0 for any."


@pytest.mark.load
def test_a_refusal_has_one_exit_code_whether_the_agent_was_there_or_not():
    variables = target_environment(WORLD_SIZE="2", RANK="0")
    with Process([bare_python(), TRAIN], env=variables, popen=forked.start) as training:
        training.expect(r"^step 3 ")

        def refusal() -> tuple[int, str, str]:
            with attach(training.pid, "-p", "gradclip:max_norm=1.0") as refused:
                code = refused.wait()
                return code, *(json.loads("\n".join(refused.out))["targets"][0][key] for key in ("error", "reason"))

        fresh = refusal()
        with attach(training.pid, "-p", "timing") as watching:
            answer = answer_of(watching)["targets"][0]
            assert (answer["plugins"], answer["added"], answer["replaced"]) == (["timing"], [], "")
            assert refusal() == fresh
            with attach(training.pid, "-p", "nan") as joining:
                answer = answer_of(joining)["targets"][0]
                assert (answer["method"], answer["plugins"], answer["added"]) == (
                    "existing",
                    ["timing", "nan"],
                    ["nan"],
                )
        assert fresh[0] == 2
        assert "2 ranks" in fresh[1]


def test_config_check_names_every_mistake(tmp_path):
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text('[serve]\nlisten = "127.0.0.1:0"\n')
    bad.write_text('[serve]\nlisten = "nowhere"\nlingering = 3\n')
    assert hookd("config", "check", good).returncode == 0
    assert json.loads(hookd("config", "check", good, "--json").stdout)["settings"]["listen"] == "127.0.0.1:0"
    done = hookd("config", "check", bad)
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    assert "lingering" in done.stderr


def test_config_check_names_plugins_and_users_that_are_not_there(tmp_path):
    path = tmp_path / "hookd.toml"
    path.write_text(
        '[attach]\nplugins = ["nann"]\n[[rule]]\nuser = "no-such-user"\nmatch = "train.py"\nplugins = ["nan", "timming"]\n'
    )
    done = hookd("config", "check", path)
    assert done.returncode == 2
    assert "[attach] plugins: there is no plugin 'nann'. Did you mean 'nan'? There are activations" in done.stderr
    assert "[[rule]] 1: there is no plugin 'timming'" in done.stderr
    path.write_text('[[rule]]\nuser = "no-such-user"\nmatch = "train.py"\nplugins = ["nan"]\n')
    done = hookd("config", "check", path)
    assert done.returncode == 0
    assert "[[rule]] 1 user: this machine has no user 'no-such-user'" in done.stderr


def test_doctor_finds_nothing_in_the_way_of_a_training_process(training):
    done = hookd("doctor", str(training.pid))
    assert done.returncode == 0, done.stdout
    assert "Nothing is in the way" in done.stdout
    checks = json.loads(hookd("doctor", str(training.pid), "--json").stdout)["checks"]
    assert {check["state"] for check in checks} <= {"ok", "note"}
    assert any(check["name"] == f"process {training.pid}" for check in checks)


def test_doctor_says_what_is_wrong_with_a_process(idle):
    done = hookd("doctor", str(idle.pid))
    assert done.returncode == 1
    assert "no torch" in done.stdout


def test_a_reader_that_leaves_gets_no_traceback():
    words = [CONSOLE, "--help"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=tool_environment()) as process:
        process.stdout.close()
        assert not process.stderr.read()


def test_no_colour_leaves_a_pipe(training):
    assert "\x1b" not in hookd("ps").stdout
