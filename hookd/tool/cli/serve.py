"""`hookd serve`: the daemon of a node."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command(short_help="Serve the metrics of all training processes of this node.")
@click.option("--listen", metavar="HOST:PORT", help="Where /metrics is.  [default: 127.0.0.1:9465]")
@click.option(
    "--web-config",
    type=click.Path(path_type=Path),
    help="TLS and passwords for it: a file in the format of Prometheus' exporter-toolkit.",
)
@click.option(
    "--allow-host",
    "allow_hosts",
    metavar="NAME",
    multiple=True,
    help="Another name under which /metrics may be asked for, such as '*.example.org'; may be repeated.",
)
@click.option(
    "--control",
    type=click.Path(path_type=Path),
    help="The control socket.  [default: /run/hookd/control.sock, or under XDG_RUNTIME_DIR]",
)
@click.option("--config", type=click.Path(path_type=Path), help="A TOML file; flags and HOOKD_… variables win over it.")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="Where incidents are kept.  [default: /var/lib/hookd, or under XDG_STATE_HOME]",
)
@click.option(
    "--linger-s", type=float, metavar="S", help="How long a dead target's counters are served.  [default: 120]"
)
@click.option("--hang-after-s", type=float, metavar="S", help="How long a silent rank is given.  [default: 60]")
@click.option("--lease-s", type=float, metavar="S", help="How long agents outlive the daemon.  [default: 900]")
@click.option(
    "--plugin-dir",
    "plugin_dirs",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A directory with plugins of your own; may be repeated.",
)
def serve(
    *,
    listen: str | None,
    web_config: Path | None,
    allow_hosts: tuple[str, ...],
    control: Path | None,
    config: Path | None,
    state_dir: Path | None,
    linger_s: float | None,
    hang_after_s: float | None,
    lease_s: float | None,
    plugin_dirs: tuple[Path, ...],
) -> int:
    """Serve the metrics of all training processes of this node, until SIGTERM or Ctrl-C.

    It attaches to what the rules of its configuration name, to processes with HOOKD=1 in their environment, and where
    `hookd attach PID` tells it to. Agents that are there already (an earlier daemon's, or those of `hookd run`) are
    found at once.
    """
    from hookd.tool.cli import address
    from hookd.tool.config import load
    from hookd.tool.daemon import process

    flags = {
        "listen": listen,
        "web_config": web_config,
        "allow_hosts": allow_hosts or None,
        "control": control,
        "state_dir": state_dir,
        "linger_s": linger_s,
        "hang_after_s": hang_after_s,
        "lease_s": lease_s,
        "plugin_dirs": plugin_dirs or None,
    }
    settings = load(flags, os.environ, config)
    with address.explaining(settings.listen, "serve"):
        return process.serve(settings)
