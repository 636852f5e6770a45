"""The checks of `hookd doctor`: each finds a fact, judges it, and names the command that fixes it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.errors import HookdError, UsageError
from hookd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.cli.outputs import CheckRow

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
CAP_DAC_OVERRIDE, CAP_SYS_PTRACE = 1, 19
MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: the subject of the check.
        state: "ok", "note" (worth knowing) or "bad" (in the way).
        found: the fact.
        cure: what the reader can do; empty if there is nothing to fix.
    """

    name: str
    state: str
    found: str
    cure: str = ""

    def as_json(self) -> CheckRow:
        """Return what `--json` prints."""
        return {"name": self.name, "state": self.state, "found": self.found, "cure": self.cure}


def of_machine(host: str | None) -> Iterator[Check]:
    """Check this machine, this user and this installation."""
    yield Check("hookd", "ok", f"{__version__} on Python {platform.python_version()} ({sys.executable})")
    from hookd.native import build
    from hookd.tool.cli import untested

    yield machine(platform.system(), platform.machine())
    yield from untested.of_machine(platform.machine())
    yield rights(Path("/proc/self/status").read_text())
    yield from sandbox(Path("/proc/self/status").read_text())
    yield yama(YAMA.read_text() if YAMA.exists() else None, may_trace_all=has_capability())
    yield self_test()
    yield native_code(build.HERE)
    yield daemon(host)
    yield plugins()
    yield from foregrounds()
    yield prometheus()


def machine(system: str, architecture: str) -> Check:
    """Whether this machine supports attaching: Linux on one of two architectures."""
    if system == "Linux" and architecture in MACHINES:
        return Check("machine", "ok", f"Linux on {architecture}")
    cure = "Only `hookd run` and `hookd.start()` can work here."
    return Check(
        "machine", "bad", f"{system} on {architecture}; attaching needs Linux on {' or '.join(MACHINES)}", cure
    )


def has_capability(status: str | None = None, number: int = CAP_SYS_PTRACE) -> bool:
    """Whether a capability is in the effective set of a /proc/PID/status (default: ours)."""
    text = Path("/proc/self/status").read_text() if status is None else status
    effective = next(line.split()[1] for line in text.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> number & 1)


def rights(status: str) -> Check:
    """Whether we may trace processes of other users."""
    if has_capability(status) and not has_capability(status, CAP_DAC_OVERRIDE):
        return Check("rights", "note", "CAP_SYS_PTRACE without CAP_DAC_OVERRIDE: files of other users cannot be read",
                     "In a container, add the capability DAC_OVERRIDE.")  # fmt: skip
    if has_capability(status):
        return Check("rights", "ok", "CAP_SYS_PTRACE: processes of every user")
    cure = "For processes of other users: sudo hookd attach PID, or --cap-add SYS_PTRACE on the container."
    if os.geteuid() == 0:
        return Check("rights", "note", "root without CAP_SYS_PTRACE: processes of root only", cure)
    return Check("rights", "note", f"no CAP_SYS_PTRACE: processes of user {os.geteuid()} only", cure)


def yama(scope: str | None, *, may_trace_all: bool) -> Check:
    """Whether Yama's ptrace_scope allows attaching.

    Source: Documentation/admin-guide/LSM/Yama.rst of Linux.
    """
    level = int(scope) if scope is not None else 0
    if level == 0:
        return Check("Yama", "ok", "off" if scope is None else "ptrace_scope 0: no restriction")
    if level == 3:
        return Check("Yama", "bad", "ptrace_scope 3: nobody may trace until the next boot", "Use `hookd run -- CMD`.")
    if may_trace_all:
        return Check("Yama", "ok", f"ptrace_scope {level}, and this process has CAP_SYS_PTRACE")
    cure = "sudo hookd attach PID, or sudo sysctl kernel.yama.ptrace_scope=0, or start the job with `hookd run -- CMD`."
    return Check("Yama", "bad", f"ptrace_scope {level}: only descendants may be traced", cure)


def sandbox(status: str) -> Iterator[Check]:
    """Whether this process has a seccomp filter, as in most containers.

    The ptrace test shows what it lets through.
    """
    if "Seccomp:\t2" in status:
        yield Check("seccomp", "note", "this process has a seccomp filter, usually that of a container")


def self_test() -> Check:
    """Trace a child process, as an attach would: some sandboxes only pretend to support ptrace."""
    from hookd.tool.inject import selftest

    try:
        selftest.check()
    except HookdError as error:
        return Check("ptrace", "bad", error.message, error.hint)
    return Check("ptrace", "ok", "a child process was stopped, read, changed and resumed")


def native_code(directory: Path) -> Check:
    """Whether the C code was compiled when hookd was installed."""
    from hookd.native import build

    missing = [name for name in build.SOURCES if not build.place(name, directory=directory).exists()]
    if not missing:
        return Check("native code", "ok", "module calls and tensors are handled in C")
    cure = "Install a C compiler (apt-get install gcc), then reinstall hookd (pip install --force-reinstall)."
    fact = f"{' and '.join(missing)} not compiled for {os.uname().machine}: there was no C compiler; hookd uses Python and torch instead, at a higher cost"
    return Check("native code", "note", fact, cure)


def daemon(host: str | None) -> Check:
    """Whether a daemon answers."""
    from hookd.tool.cli import root_daemon, targets

    try:
        client = targets.daemon(host)
    except UsageError:
        raise
    except HookdError as error:
        return Check("daemon", "bad", error.message, error.hint)
    if client is None and (of_root := root_daemon.find()) is not None:
        return Check("daemon", "note", of_root.description, of_root.hint)
    if client is None:
        return Check("daemon", "note", "not running; `hookd attach` serves in the foreground instead")
    return Check("daemon", "ok", f"answers on {client.path}")


def foregrounds() -> Iterator[Check]:
    """Yield the foreground attaches of this user; of several only their number, to fit on a screen."""
    from hookd.tool.cli import targets

    servers = targets.foregrounds()
    for server in servers[:1]:
        pids = ", ".join(str(target["pid"]) for target in server["targets"])
        text = f"process {server['pid']} serves {pids or 'nothing yet'} on {server['url']}/metrics"
        yield Check(
            "attach", "note", text if len(servers) == 1 else f"{len(servers)} serve here; hookd status lists them"
        )


def plugins() -> Check:
    """Whether plugins are installed."""
    from hookd.tool.cli import plugin

    names = sorted(row["name"] for row in plugin.installed(()))
    if not names:
        return Check("plugins", "bad", "none is installed", "Reinstall hookd: its own plugins are missing.")
    return Check("plugins", "ok", ", ".join(names))


def prometheus() -> Check:
    """Whether Prometheus' own tools are installed; hookd does not need them."""
    tools = [name for name in ("prometheus", "promtool") if shutil.which(name)]
    if tools:
        return Check("Prometheus", "ok", f"{' and '.join(tools)} found")
    return Check("Prometheus", "note", "not installed here (hookd does not need it; its system tests do)")
