"""Every command in the documents is run as printed, here or by another test; see tests/support/documented.py."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from hookd.errors import NoSuchTarget
from hookd.tool.attach.discover import find_page
from hookd.tool.cli import cli
from tests.support import forked
from tests.support.commands import blocks, commands, kind, spoken
from tests.support.daemon import Daemon
from tests.support.documented import COMMANDS, NO_COMMANDS, Run
from tests.support.documents import pages
from tests.support.environment import REPOSITORY, bare_python, target_environment, tool_environment
from tests.support.processes import Process, wait_until
from tests.support.training import paced_example

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.story
RUN = "llama"
UNTIL = {case.until for case in COMMANDS.values() if isinstance(case, Run)} - {""}
RUNS = {text: case for text, case in COMMANDS.items() if isinstance(case, Run)}
FILL = {
    "PID": "{pid}",
    "4711": "{pid}",
    "'#12'": "'#{incident}'",
    "127.0.0.1:9465": "{address}",
    "127.0.0.1:9466": "127.0.0.1:{port}",
    "/run/mine": "{scratch}/mine",
    "/var/lib/mine": "{scratch}/mine",
    "/var/lib/hookd/incidents.sqlite": "{scratch}/state/incidents.sqlite",
}
"""Words in a command that stand for something of the reader's own."""


# ---- the collected commands


def test_every_command_in_the_documents_is_run_or_says_why_not():
    where = defaultdict(list)
    for command in commands():
        where[command.text].append(command.where)
    new = {text: places for text, places in where.items() if text not in COMMANDS and text not in UNTIL}
    assert not new, "put them into tests/support/documented.py"
    assert not set(COMMANDS) - set(where), "no document has these any more"


def test_every_block_is_commands_or_data_or_said_to_be_neither():
    unknown = [(one.page, one.text.strip()) for page in pages() for one in blocks(page) if not kind(one)]
    named = {key: [text for page, text in unknown if page == key[0] and text.startswith(key[1])] for key in NO_COMMANDS}
    assert not [key for key, found in named.items() if not found], "no document has these any more"
    rest = [(page, text) for page, text in unknown if not any(text in found for found in named.values())]
    assert not rest, "neither a known program, nor Python, nor TOML: see PROGRAMS and NO_COMMANDS"


@pytest.mark.parametrize("text", sorted(text for text, case in COMMANDS.items() if getattr(case, "node", "")))
def test_a_test_that_is_named_for_a_command_is_there(text):
    path, _, name = COMMANDS[text].node.partition("::")
    assert name in {
        one.name for one in ast.walk(ast.parse((REPOSITORY / path).read_text())) if isinstance(one, ast.FunctionDef)
    }


def test_a_command_and_an_option_that_a_text_names_is_there():
    for command in spoken():
        words = command.text.partition(" -- ")[0].split()[1:]
        found: click.Command = cli
        while isinstance(found, click.Group) and words and not words[0].startswith("-"):
            name = words.pop(0).strip(",.;:…")
            child = found.get_command(click.Context(found), name)
            assert child is not None, f"{command.where}: {command.text}"
            found = child
        known = {option for parameter in found.params for option in parameter.opts}
        given = {word.partition("=")[0].strip("[]…,") for word in words if re.match(r"\[?--\w", word)}
        assert given <= known | {"--help"}, f"{command.where}: {command.text}"


# ---- running them


class Setting:
    """A training of the run "llama" that has made a NaN, a daemon, and a directory like a reader's."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        for name in ("deploy", "examples"):
            shutil.copytree(REPOSITORY / name, scratch / name)
        paced_example(scratch)
        (scratch / "widths.py").write_text(_smallest_plugin())
        (scratch / "hookd.toml").write_text("[eval]\nallow = true\n")
        environment = target_environment(HOOKD_RUN=RUN)
        self.training = Process([bare_python(), "train.py"], env=environment, cwd=scratch, popen=forked.start)
        self.daemon: Daemon | None = None
        self.shown = 0

    def begin(self) -> None:
        """Attach through the daemon, and make the training produce a NaN."""
        self.training.expect(r"^step 3 ")
        self.daemon = Daemon(self.scratch, "--config", self.scratch / "hookd.toml")
        self.client = self.daemon.client
        self.client.attach(self.pid, timeout_s=60)
        self.training.signal(signal.SIGUSR1)
        self.incident = wait_until(self._newest, what="the incident")

    def _newest(self) -> int:
        # Its targets may include other tests' trainings: it finds all agents of the machine.
        rows = self.client.incidents(run=RUN, kind="nan")
        return rows[0]["id"] if rows else 0

    @property
    def pid(self) -> int:
        return self.training.pid

    def bring(self, given: str) -> None:
        """Attach or detach, if it is not done already."""
        is_attached = find_page(self.pid) is not None
        if given == "attached" and not is_attached:
            self.client.attach(self.pid, timeout_s=60)
        if given == "attached":
            wait_until(self._is_shown, what="a step, and the model's modules")
        if given == "detached" and is_attached:
            self.client.detach(self.pid)
            wait_until(lambda: find_page(self.pid) is None, what="the agent's end")

    def _is_shown(self) -> bool:
        with contextlib.suppress(NoSuchTarget):  # it was asked to detach a moment ago
            report = self.client.report(self.pid)
            return report["step"]["current"] > 1 and any(row["name"].startswith("blocks.") for row in report["modules"])
        return False

    def fill(self, text: str, own: dict[str, str]) -> str:
        """Replace the words of a command that stand for something."""
        words = {"pid": self.pid, "scratch": self.scratch, "incident": self.incident, "port": self.port}
        words["address"] = self.daemon.url.removeprefix("http://")
        for word, value in {**FILL, **own}.items():
            filled = value.format(**words)
            text = re.sub(rf"(?<![\w.-]){re.escape(word)}(?![\w.])", lambda _, filled=filled: filled, text)
        return text

    def start(self, text: str, case: Run) -> Process:
        """Start a command in a shell."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        host = {} if case.alone else {"HOOKD_HOST": f"unix://{self.client.path}"}
        environment = tool_environment(PATH=path, COLUMNS="120", XDG_RUNTIME_DIR=self.scratch / "nobody", **host)
        environment.setdefault("HOOKD_CONTROL", "") if case.alone else None
        words = ["bash", "-c", f"set -o pipefail; {self.fill(text, dict(case.fill))}"]
        return Process(words, env=environment, cwd=REPOSITORY if case.at_home else self.scratch, popen=_in_a_group)

    def run(self, text: str, case: Run) -> None:
        """Run a command as documented, and check its output as the table says."""
        self.bring(case.given)
        self.port = free_port()
        with self.start(text, case) as process:
            try:
                if case.stays:
                    process.expect(case.says)
                    if case.until:
                        self.check(case.until, Run(r"\S", fill=case.fill))
                    os.killpg(process.pid, signal.SIGINT)
                assert as_a_shell_says(process.wait()) == case.status, process.describe()
                if case.then:
                    self.check(case.then, case)
                else:
                    assert re.search(case.says, "\n".join([*process.out, *process.err]), re.MULTILINE), (
                        process.describe()
                    )
            finally:
                if process.popen.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def check(self, text: str, case: Run) -> None:
        with self.start(text, case) as process:
            assert process.wait() == case.status, process.describe()
            assert re.search(case.says, "\n".join(process.out)), process.describe()

    def close(self) -> None:
        if self.daemon is not None:
            self.daemon.process.close()
        self.training.close()


def _in_a_group(command, **how):
    return subprocess.Popen(command, start_new_session=True, **how)


def _smallest_plugin() -> str:
    guide = REPOSITORY / "docs" / "plugins.md"
    text = next(one.text for one in blocks(guide) if "class Widths" in one.text)
    return re.sub(r"^ {4}", "", text, flags=re.MULTILINE)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def setting(attachable, tmp_path_factory) -> Iterator[Setting]:
    one = Setting(tmp_path_factory.mktemp("documented"))
    try:
        one.begin()
        yield one
    finally:
        one.close()


def as_a_shell_says(status: int) -> int:
    """Return `$?`: after a Ctrl-C during a pipeline, bash also dies by SIGINT if the last command did so before it."""
    return 128 - status if status < 0 else status


@pytest.mark.parametrize("text", RUNS)
def test_a_command_does_what_the_document_says(setting, text):
    case = RUNS[text]
    if case.needs and shutil.which(case.needs) is None and not (Path(sys.executable).parent / case.needs).exists():
        pytest.skip(f"{case.needs} is not here")
    setting.run(text, case)
