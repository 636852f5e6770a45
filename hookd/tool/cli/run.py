"""`hookd run -- COMMAND`: start a command with the agent in place from the first step."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

import click

from hookd.errors import HookdError, UsageError
from hookd.tool.cli import address, options, output, targets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hookd.tool.attach.launch import Launch
    from hookd.tool.config import ServeConfig

POLL_S = 1.0
"""How often processes are looked for in which the agent has not started."""


@click.command(
    short_help="Start a command, and observe its training processes.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("command", metavar="-- CMD…", nargs=-1, required=True)
@options.plugins
@click.option("--run", "name", metavar="NAME", help="The label `run`.  [default: derived from the environment]")
@click.option("--listen", metavar="ADDR", help="Serve the metrics of this command on HOST:PORT.  [default: the "
              "address of the daemon if one runs here, else 127.0.0.1:9465]")  # fmt: skip
@options.plugin_dirs
@click.option("--fingerprint", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Record digests of what each step computes in FILE, for `hookd diff`.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="If the command cannot be started, print the error as JSON.")
def run(
    *,
    command: tuple[str, ...],
    plugins: tuple[str, ...],
    name: str | None,
    listen: str | None,
    plugin_dirs: tuple[Path, ...],
    fingerprint: Path | None,
    as_json: bool,  # noqa: ARG001  read in `main`
) -> None:
    """Start a command, and observe every training process that it starts, also through launchers such as torchrun.

    hookd need not be installed in the environment of the command. The exit code is that of the command. The daemon of
    this machine (`hookd serve`) serves the metrics; without one, this process serves them while the command runs.
    """
    from hookd.tool.attach import AttachRequest
    from hookd.tool.attach import command as process
    from hookd.tool.config import load
    from hookd.tool.daemon import log

    log.to_terminal()
    config = load({"listen": listen}, os.environ)
    specs = tuple(map(config.with_options, options.parse_plugins(plugins) or config.plugins))
    if fingerprint is not None:
        from hookd.tool.fingerprints import command as fingerprints

        specs = fingerprints.with_plugin(specs)
        fingerprints.require_writable(fingerprint)
    request = AttachRequest(
        plugins=specs,
        run=name,
        plugin_dirs=(*plugin_dirs, *config.plugin_dirs),
        budget=config.budget,
        detail=config.detail,
    )
    process.run(command, request, functools.partial(_beside, config, listen is not None, fingerprint))


@contextlib.contextmanager
def _beside(
    config: ServeConfig,
    is_required: bool,  # noqa: FBT001
    fingerprint: Path | None,
    pid: int,
    prepared: Launch,
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        output.say(_serve(config, stack, pid, is_required=is_required))
        if fingerprint is not None:
            from hookd.tool.cli.beside import Descendants
            from hookd.tool.fingerprints.command import recording

            stack.enter_context(
                recording(Descendants(pid), fingerprint.absolute(), max_bytes=256 << 20, say=output.say)
            )
        with _reporting_failures(prepared):
            yield
        if not prepared.has_started():
            output.say(
                "hookd: no process of this command was observed: none imported torch, or PYTHONPATH lost hookd's directory "
                "(env -i, python -I)"
            )


def _serve(config: ServeConfig, stack: contextlib.ExitStack, pid: int, *, is_required: bool) -> str:
    """Serve the command's metrics if no daemon does, and return a message with their address.

    The command matters most: neither a daemon that does not answer nor an address in use stops it, unless --listen
    requires the address.

    Raises:
        HookdError: the address of --listen cannot be used, or HOOKD_HOST is not valid.
    """
    from hookd.tool.cli import beside

    warning = ""
    if not is_required:
        try:
            client = targets.daemon(None, timeout_s=targets.ANSWER_S)
            if client is not None:
                return f"metrics on {client.status()['url']}/metrics, by the daemon that runs here"
        except UsageError:
            raise
        except HookdError as error:
            warning = f"hookd: warning: {error.message}; the command runs anyway\n"
    try:
        with address.explaining(config.listen, "run"):
            url = stack.enter_context(beside.serving(config, pid))
    except HookdError as error:
        if is_required:
            raise
        return f"{warning}hookd: metrics are not served: {error.message}; the command runs anyway. {error.hint}"
    return f"{warning}metrics on {url}/metrics while the command runs"


@contextlib.contextmanager
def _reporting_failures(prepared: Launch) -> Iterator[None]:
    """Report each process in which the agent does not start, within a second."""
    reported, over = set[int](), Event()

    def report() -> None:
        for pid, why in prepared.failures().items():
            if why and pid not in reported:  # it may be about to be written
                reported.add(pid)
                output.say(f"hookd: process {pid} is not observed: {why}")

    def poll() -> None:
        while not over.wait(POLL_S):
            report()

    thread = Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    report()
