"""Hostile plugins and plugin files, and other users who want hookd's files or bring code past the allow-list."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hookd.errors import HookdError
from hookd.tool.attach import payload, trusted
from hookd.tool.config import PluginSpec
from tests.attacks.attack import ATTACKER, VICTIM, Result, attack
from tests.attacks.hostile_code import CODE, TRAINING, in_hook
from tests.attacks.people import folder_of, process_of
from tests.support.daemon import Daemon
from tests.support.environment import REPOSITORY, TARGETS, target_environment, tool_environment
from tests.support.processes import Process, wait_until
from tests.support.tool import HOOKD, Page, start_hookd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.daemon.client import DaemonClient

CONSOLE = Path(sys.executable).with_name("hookd")
HOLDER = REPOSITORY / "tests" / "support" / "page_holder.py"
TRIAL_S, ENOUGH_BYTES = 25, 1_500_000_000
_OPEN_UMASK = ("sh", "-c", 'umask 0; exec "$@"', "sh")
_FIND = """
import os, sys
for folder, inner, files in os.walk(sys.argv[1], onerror=None):
    inner[:] = [name for name in inner if not name.startswith("torchinductor")]  # of torch itself
    for path in [folder] * (folder != sys.argv[1]) + [os.path.join(folder, name) for name in files]:
        if not os.path.islink(path) and (os.access(path, os.W_OK) or (not os.path.isdir(path) and os.access(path, os.R_OK))):
            print("within reach:", path)
print("looked")
"""


@attack(
    "another user", "read or replace what hookd writes under a umask of 0: bundles, traces, reports, the store", tries=2
)
def files_of_others(tries: int) -> Result:
    found: list[str] = []
    for uid in (0, VICTIM)[:tries]:
        with folder_of(uid) as home:
            made = _write_everything(uid, home)
            with process_of(ATTACKER, [sys.executable, "-c", _FIND, home]) as search:
                search.wait()
                assert search.out[-1:] == ["looked"], search.describe()
                found += [str(Path(line.partition(": ")[2]).relative_to(home)) for line in search.out[:-1]]
    return Result(
        tries, len(found), f"of {made} files these were within reach: {', '.join(sorted(set(found))) or 'none'}"
    )


def _write_everything(uid: int, home: Path) -> int:
    """Make hookd write every kind of file into a user's home directory, as that user; return the number of files."""
    options = {"HOME": str(home), "TMPDIR": str(home), "HOOKD_SCAN_S": "0.1", "HOOKD_POLL_S": "0.1"}
    state, control = home / "a" / "state", home / "b" / "control.sock"
    serve = ["serve", "--listen", "127.0.0.1:0", "--state-dir", state, "--control", control]
    training = [
        sys.executable,
        TARGETS / "faulty.py",
        "--fault",
        "forward-nan",
        "--at",
        "5",
        "--steps",
        "0",
        "--pause",
        "0.05",
    ]
    run = ["run", "-p", "capture", "--", *training]
    with (
        process_of(uid, [*_OPEN_UMASK, CONSOLE, *serve], **options) as daemon,
        process_of(uid, [*_OPEN_UMASK, CONSOLE, *run], **options) as job,
        Page.below(job, 120) as page,
    ):
        pid = str(page.reader.identity()["pid"])
        job.expect("^step 10 ")
        daemon.expect("found an agent")
        wait_until(lambda: list(home.glob(".local/state/hookd/bundles/hookd-*")), what="the bundle")
        for words in (
            ["trace", pid, "--steps", "1", "-o", home / "trace.json"],
            ["record", pid, "--seconds", "0.2", "-o", home / "record.svg"],
            ["report", pid, "--html", home / "report.html", "--host", f"unix://{control}"],
        ):
            with process_of(uid, [*_OPEN_UMASK, CONSOLE, *words], **options) as tool:
                assert tool.wait() == 0, tool.describe()
        return sum(path.is_file() for path in home.rglob("*"))


@attack("a plugin author", "have code run by `plugin check --static` or `plugin list`, which only read", tries=10)
def code_where_only_the_source_is_read(tries: int) -> Result:
    run = 0
    evil = "import pathlib; (pathlib.Path(__file__).parent / 'it-ran').touch()\n"
    for _ in range(tries):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "hostile.py").write_text(evil + in_hook("pass"))
            for module in ("ast", "json", "mypy", "torch", "conftest", "setup", "sitecustomize", "evil"):
                (folder / f"{module}.py").write_text(evil)
            (folder / "mypy.ini").write_text(f"[mypy]\nplugins = {folder}/evil.py\n")
            for words in (["check", "--static", "."], ["list", "--plugin-dir", "."]):
                with Process([CONSOLE, "plugin", *words], env=tool_environment(), cwd=folder) as tool:
                    tool.wait()
                    output = "\n".join([*tool.out, *tool.err])
                    assert "hostile" in output, tool.describe()
            run += (folder / "it-ran").exists()
    return Result(tries, run, f"it ran {run} times")


@contextlib.contextmanager
def _files_that_are_none() -> Iterator[dict[str, Path]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = {
            "a gigabyte": folder / "huge.py",
            "a pipe": folder / "pipe.py",
            "a device without end": folder / "zero.py",
            "nested too deep": folder / "deep.py",
            "a name without end": folder / "chain.py",
            "names that a terminal obeys": folder / "\x1b]0;owned\x07.py",
        }
        with made["a gigabyte"].open("wb") as file:
            file.truncate(1 << 30)
        os.mkfifo(made["a pipe"])
        made["a device without end"].symlink_to("/dev/zero")
        made["nested too deep"].write_text("x = " + "-" * 100_000 + "1\n")
        made["a name without end"].write_text(in_hook("x" + ".x" * 2500))
        made["names that a terminal obeys"].write_text("class Hostile(Plugin):\n    name = '\\x1b[2J'\n    nonsense(\n")
        yield made


@attack(
    "a plugin author",
    "stop or fill `plugin check` by a file: a gigabyte, a pipe, /dev/zero, nesting, escapes",
    tries=6,
    short=6,
)
def source_without_end(tries: int) -> Result:
    bad = []
    with _files_that_are_none() as made:
        for kind, path in list(made.items())[:tries]:
            bad += [f"{kind}: {word}" for word in _checked(path, "--static")]
    return Result(tries, len(bad), f"with each file: {', '.join(bad) or 'an error and its line within its limits'}")


@attack(
    "a plugin author",
    "escape `plugin check` by code: fork, flood, kill, loop, escapes, a false answer",
    tries=len(CODE),
    short=1,
)
def code_that_is_checked(tries: int) -> Result:
    bad = []
    for kind, text in list(CODE.items())[:tries]:
        mark = f"left-{os.getpid()}-{time.monotonic_ns()}"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "hostile.py")
            path.write_text(text)
            bad += [f"{kind}: {word}" for word in _checked(path, marked=mark)]
            assert Path(folder, "it-ran").exists(), kind
    return Result(tries, len(bad), ", ".join(bad) or "each ended in time, was reported, and left nothing behind")


def _checked(path: Path, *more: str, marked: str = "") -> list[str]:
    """Check a plugin as a command does; return what went wrong: time, memory, escapes, a traceback, processes left."""
    main = f"import sys; from hookd.tool.cli import plugin_check, main; plugin_check.TIMEOUT_S = {TRIAL_S}; sys.exit(main())"
    command = [sys.executable, "-c", main, "plugin", "check", *more, path]
    begun, bad = time.monotonic(), []
    environment = tool_environment(ATTACK_MARK=marked)
    with Process(command, env=environment, popen=_limited) as tool:
        try:
            tool.wait(TRIAL_S + 60)
        except AssertionError:
            return ["it does not end"]
        output = "\n".join([*tool.out, *tool.err])
    bad += ["a terminal obeys it"] * any(mark in output for mark in ("\x1b", "\x9b", "\x07"))
    bad += ["a traceback of hookd's own"] * ("hookd/tool/cli" in output and "Traceback" in output)
    bad += ["no error"] * (tool.popen.returncode == 0 and not marked)
    left = [one for one in psutil.process_iter(["environ"]) if marked and marked in str(one.info["environ"])]
    for one in left:
        one.kill()
    bad += ["a process is left"] * bool(left)
    assert time.monotonic() - begun < TRIAL_S + 90
    return bad


def _limited(*words: object, **options: object) -> subprocess.Popen[str]:
    """Start a command with limited memory."""
    process = subprocess.Popen(*words, **options)  # type: ignore[call-overload]
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (ENOUGH_BYTES, ENOUGH_BYTES))
    return process  # type: ignore[no-any-return]


@attack("another user", "bring code past `[plugins] allow` by a name that is nearly allowed", tries=10)
def name_that_is_nearly_allowed(tries: int) -> Result:
    names = [
        *"NAN Nan n\u0430n \uff4e\uff41\uff4e ./nan nan. nan/../x x/nan [n]an n?n * nan_ na timing".split(),
        "nan\0",
    ]
    through = []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "hookd.toml")
        config.write_text('[plugins]\nallow = ["nan"]\n[attach]\nplugins = ["nan"]\n')
        daemon = Daemon(Path(folder), "--config", config)
        with daemon.process, process_of(VICTIM, [sys.executable, HOLDER]) as holder:
            holder.expect("^ready$")
            for _ in range(tries):
                orders = [{"name": name} for name in names] + [f"{name}:a=b" for name in names] + [{"name": "nan"}]
                dirs = [[] for _ in orders[:-1]] + [[folder]]
                for order, plugin_dirs in zip(orders, dirs, strict=True):
                    through += _ordered(daemon.client, holder.pid, order, plugin_dirs)
    return Result(
        tries * len(orders),
        len(through),
        f"{len(names)} spellings, and a directory of the asker's: {through or 'refused'}",
    )


def _ordered(client: DaemonClient, pid: int, order: object, plugin_dirs: list[str]) -> list[str]:
    """Order a plugin to be loaded; return it if the order was not simply refused."""
    try:
        client.change_plugins(pid, "load", order, timeout_s=5, plugin_dirs=plugin_dirs)
    except HookdError as exc:
        if exc.reason in ("plugin-not-allowed", "config"):
            return []
        return [f"{order!r} ({exc.reason})"]
    return [repr(order)]


@attack(
    "another user", "exchange the plugins in a directory while root carries them into a target", tries=2000, short=100
)
def plugin_exchanged(tries: int) -> Result:
    good, evil = "# good\n" + in_hook("pass"), "# evil\n" + in_hook("pass")
    came: dict[str, int] = {}
    through = 0
    with folder_of(ATTACKER) as place, folder_of(0) as ours:
        (ours / "hostile.py").write_text(good)
        theirs = place / "theirs"
        theirs.mkdir()
        (theirs / "hostile.py").write_text(evil)
        os.chown(theirs, ATTACKER, ATTACKER)
        os.chown(theirs / "hostile.py", ATTACKER, ATTACKER)
        turn = (
            "import os, sys\nplace, ours = sys.argv[1:]\n"
            "os.symlink(ours, place + '/ours')\nos.symlink(place + '/theirs', place + '/plugins')\nprint('ready', flush=True)\n"
            "while True:\n  for one in (ours, place + '/theirs'):\n"
            "    os.symlink(one, place + '/new'); os.rename(place + '/new', place + '/plugins')\n"
        )
        with process_of(ATTACKER, [sys.executable, "-c", turn, place, ours]) as exchange:
            exchange.expect("^ready$")
            for _ in range(tries):
                try:
                    built = payload.build(
                        [PluginSpec("hostile", {}, by_name=True)], (place / "plugins",), trusted.of_target(VICTIM)
                    )
                except HookdError as exc:
                    answer = exc.reason
                else:
                    (source,) = built.sources
                    is_evil = any(b"# evil" in text for text in source.files.values())
                    is_other = source.sha256 != built.plugins[0]["sha256"]
                    through += is_evil or is_other
                    answer = "the attacker's" if is_evil else "root's"
                came[answer] = came.get(answer, 0) + 1
    return Result(tries, through, "; ".join(f"{answer}: {count}" for answer, count in sorted(came.items())))


@attack(
    "a plugin author",
    "change or end a training by what a plugin does at each module call",
    tries=len(TRAINING),
    short=1,
    is_long=True,
)
def plugin_in_a_training(tries: int) -> Result:
    plain = _trained({})[0]
    if tries == 1:  # all of them at once, except the one that stops the training
        several = {f"hostile{n}": act for n, (kind, act) in enumerate(TRAINING.items()) if "for ever" not in kind}
        result, states = _trained(several)
        bad = [] if result == plain else ["the training is another one"]
        return Result(1, len(bad), _in_words(bad, states))
    bad, states = [], {}
    for kind, act in TRAINING.items():
        if "for ever" not in kind:
            result, state = _trained({"hostile": act})
            states[kind] = state["hostile"]
            bad += [kind] * (result != plain)
    return Result(len(TRAINING), len(bad), _in_words(bad, states))


def _in_words(bad: list[str], states: dict[str, str]) -> str:
    quarantined = sum(state == "quarantined" for state in states.values())
    return f"the same losses and weights, bit for bit; {quarantined} of {len(states)} were quarantined{'; but: ' * bool(bad)}{', '.join(bad)}"


def _trained(acts: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Train with plugins; return the losses, the checksum, and the last state of each plugin."""
    program = [sys.executable, TARGETS / "mlp.py", "--steps", "30", "--pause", "0.01" if acts else "0"]
    with tempfile.TemporaryDirectory() as folder:
        for name, act in acts.items():
            text = in_hook(act).replace('name = "hostile"', f'name = "{name}"')
            Path(folder, f"{name}.py").write_text(text)
        chosen = [word for name in acts for word in ("-p", name)]
        command = [*HOOKD, "run", *chosen, "--plugin-dir", folder, "--", *program] if acts else program
        environment = tool_environment() if acts else target_environment()
        with Process(command, env=environment, cwd=TARGETS) as job, contextlib.ExitStack() as stack:
            page = stack.enter_context(Page.below(job)) if acts else None
            job.wait()
            states = page.values()["hookd_plugin_state"] if page is not None else {}
            kept = [line for line in job.out if line.startswith(("step ", "done "))]
    return kept, {name: state for (name, state), on in states.items() if on and name in acts}


_SECRETIVE = """
import os, sys
import torch
from torch import nn

class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.token = nn.Linear(4, 1), "secret-in-an-attribute"
    def forward(self, x):
        key = "secret-in-a-local"
        return self.linear(x)

model = Holder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print("ready", flush=True)
while True:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    __import__("time").sleep(0.02)
"""
_SECRET_KINDS = ("in-the-environment", "in-an-attribute", "in-a-local", "in-an-argument")
_ASK = """
import json, os, socket, sys, urllib.error, urllib.request
url, control, state = sys.argv[1:]
texts, todo = [], ["/", "/metrics", "/sd", "/api/v1/targets", "/api/v1/incidents", "/api/v1/panels", "/run/secretive.py"]
for path in [*todo, *("/incident/%d" % n for n in range(1, 9))]:
    try:
        texts.append(urllib.request.urlopen(url + path, timeout=10).read().decode())
    except urllib.error.HTTPError as error:
        texts.append(error.read().decode())
for path in (control, state, *(os.path.join(state, name) for name in ("incidents.sqlite", "held.json"))):
    try:
        if path == control:
            socket.socket(socket.AF_UNIX).connect(path)
            texts.append("secret-of-the-control-socket")
        else:
            texts += os.listdir(path) if os.path.isdir(path) else [open(path, errors="replace").read() and "secret-of-the-store"]
    except OSError:
        pass
print(json.dumps(texts))
"""


@attack(
    "another user",
    "read secrets of a training by the port, the control socket or the store, also those that `eval` showed",
)
def secrets_of_a_training(tries: int) -> Result:
    with folder_of(0) as ours, folder_of(VICTIM) as theirs:
        script = theirs / "secretive.py"
        script.write_text(_SECRETIVE)
        (ours / "hookd.toml").write_text("[eval]\nallow = true\n")
        daemon = Daemon(ours, "--config", ours / "hookd.toml")
        secret = {"SECRET": "secret-in-the-environment", "HOOKD_RUN": "secretive.py", "HOME": str(theirs)}
        command = [sys.executable, "-m", "hookd", "run", "--", sys.executable, script, "--key=secret-in-an-argument"]
        with daemon.process, process_of(VICTIM, command, **secret) as job, Page.below(job) as page:
            pid = page.reader.identity()["pid"]
            wait_until(lambda: any(row["pid"] == pid for row in daemon.client.targets()), what="the target")
            wait_until(
                lambda: page.reader.identity()["control"] and page.values()["hookd_steps"].get((), 0) > 2,
                what="its agent",
            )
            shown = str(daemon.client.evaluate(pid, "__import__('os').environ['SECRET'] + models[0].token", 20.0))
            assert "in-the-environment" in shown and "in-an-attribute" in shown, shown  # noqa: PT018
            for command in (["snapshot", str(pid)], ["stack", str(pid)]):
                with start_hookd(*command, HOOKD_HOST=f"unix://{daemon.client.path}") as tool:
                    tool.wait()
            with process_of(
                ATTACKER, [sys.executable, "-c", _ASK, daemon.url, daemon.client.path, ours / "state"]
            ) as asking:
                assert asking.wait() == 0, asking.describe()
                texts = " ".join(json.loads(asking.out[-1]))
    assert "secretive.py" in texts, "the pages show the run"
    found = [kind for kind in (*_SECRET_KINDS, "of-the-control-socket", "of-the-store") if f"secret-{kind}" in texts]
    return Result(
        tries * len(_SECRET_KINDS),
        len(found),
        f"found: {', '.join(found) or 'none, though `eval` had shown two of them'}",
    )
