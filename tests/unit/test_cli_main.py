"""The command itself, whatever its arguments."""

from __future__ import annotations

import io
import os
import sys
from types import SimpleNamespace

import pytest
from click import Argument, Context
from click.shell_completion import shell_complete

from hookd.errors import HookdError
from hookd.tool.cli import address, cli, main
from hookd.tool.cli.options import Pid
from hookd.tool.config import Address
from hookd.tool.linux import ports
from hookd.tool.linux.owner import user_name
from tests.support import emulated
from tests.support.listener import listening


@pytest.mark.parametrize("word", ["\u0663", "9" * 5000])
def test_a_pid_has_ascii_digits_and_no_more_than_a_number_of_64_bits(word, capsys):
    assert main(["detach", word]) == 2
    assert "is not a process id" in capsys.readouterr().err
    assert main(["report", f"#{word}"]) == 2
    assert "is not an incident number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["stauts"], "No such command 'stauts'. Did you mean 'status'?"),
        (["plugin", "lsit"], "No such command 'lsit'. Did you mean 'list'?"),
        (["frobnicate"], "No such command 'frobnicate'."),
        (["--jsno"], "No such option '--jsno'."),
        (["run", "-p", "timming", "--", "true"], "Did you mean 'timing'? There are activations,"),
    ],
)
def test_what_is_nearest_to_a_word_that_is_not_known_is_named(words, told, capsys):
    assert main(words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("hookd sta", {"status", "stack"}),
        ("hookd plugin en", {"enable"}),
        ("hookd attach -p n", {"nan"}),
        ("hookd plugin enable 7 ti", {"timing"}),
    ],
)
def test_words_are_completed(words, completed, monkeypatch, capsys):
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert shell_complete(cli, {}, "hookd", "_HOOKD_COMPLETE", "bash_complete") == 0
    assert {line.removeprefix("plain,") for line in capsys.readouterr().out.split()} == completed


def test_a_pid_is_completed_from_the_processes_that_train(monkeypatch):
    process = SimpleNamespace(pid=4711, state="attachable", cmdline=("python", "train.py"))
    monkeypatch.setattr("hookd.tool.attach.discover.candidates", lambda: [process])
    (item,) = Pid().shell_complete(Context(cli), Argument(["pid"]), "47")
    assert (item.value, item.help) == ("4711", "python train.py")


def test_a_directory_without_plugins_is_named_with_its_full_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_daemon").mkdir()
    (tmp_path / "of_daemon" / "a.py").write_text('class A(DaemonPlugin):\n    name = "a"\n')
    assert main(["plugin", "list", "--plugin-dir", ".", "--plugin-dir", "of_daemon"]) == 0
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "no plugin in" in line)
    assert line == f"hookd: no plugin in {tmp_path} (it has neither *.py nor */__init__.py)"


def test_a_terminal_that_cannot_show_a_character_is_shown_the_rest(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main(["plugin", "list"]) == 0
    print("5 µs")
    sys.stdout.flush()
    assert b"activations" in shown.getvalue()
    assert shown.getvalue().endswith(b"5 ?s\n")


@pytest.fixture
def other():
    """Return the pid and the port of another process that listens."""
    with listening() as found:
        yield found


def refused(port):
    """Return the message about an address that is in use."""
    with pytest.raises(HookdError) as caught, address.explaining(Address("127.0.0.1", port), "serve"):
        raise HookdError("it is in use", reason="address-in-use")
    return caught.value.message


@emulated.lacks("proc")
def test_a_program_that_holds_the_port_is_named_with_user_and_command(other):
    pid, port = other
    whose = f"it is in use: process {pid} of user {user_name(os.getuid())} ({sys.executable} -c "
    assert refused(port).startswith(whose)
    assert refused(port).endswith(") listens there")


def test_of_a_program_that_only_root_may_see_the_user_is_named(other, monkeypatch):
    monkeypatch.setattr(ports, "listeners", lambda _: [])
    assert refused(other[1]) == (
        f"it is in use: a process of user {user_name(os.getuid())} listens there; root can see which: "
        f"ss -tlnp 'sport = :{other[1]}'"
    )
    monkeypatch.setattr(ports, "owners", lambda _: [])
    assert refused(other[1]) == "it is in use"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["serve"], "hookd serve --listen 127.0.0.1:0"),
        (["-v", "attach", "7"], "hookd -v attach --listen 127.0.0.1:0 7"),
        (["serve", "--listen", ":9465"], "free the port"),
        (["serve", "--listen=:9465"], "free the port"),
    ],
)
def test_where_an_address_is_in_use_another_is_offered_unless_a_person_chose_it(words, hint, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hookd", *words])
    monkeypatch.setattr(address, "_ports", lambda: [("hookd serve (process 3)", 9465), ("another", 9466)])
    command = next(word for word in words if word in ("serve", "attach"))
    with pytest.raises(HookdError) as caught, address.explaining(Address("0.0.0.0", 9465), command):
        raise HookdError("it is in use", reason="address-in-use", hint="free the port")
    assert (caught.value.message, caught.value.hint) == ("it is in use: hookd serve (process 3) serves there", hint)
