"""`hookd serve`: run the daemon of a node."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command(short_help="Serve the metrics of all training processes of this node.")
@click.option("--listen", metavar="HOST:PORT", help="Address on which to serve /metrics.  [default: 127.0.0.1:9465]")
@click.option(
    "--web-config",
    type=click.Path(path_type=Path),
    help="File with TLS settings and passwords, in the format of Prometheus' exporter-toolkit.",
)
@click.option(
    "--allow-host",
    "allow_hosts",
    metavar="NAME",
    multiple=True,
    help="Accept requests for this host name as well, such as '*.example.org'; may be repeated.",
)
@click.option(
    "--control",
    type=click.Path(path_type=Path),
    help="Control socket.  [default: /run/hookd/control.sock, or under XDG_RUNTIME_DIR]",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="TOML file with settings; flags and HOOKD_… variables override it.",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="Directory in which incidents are stored.  [default: /var/lib/hookd, or under XDG_STATE_HOME]",
)
@click.option(
    "--linger-s",
    type=float,
    metavar="S",
    help="Seconds for which the counters of a dead target are still served.  [default: 120]",
)
@click.option(
    "--hang-after-s",
    type=float,
    metavar="S",
    help="Seconds without an event before a rank is reported as hanging.  [default: 60]",
)
@click.option("--lease-s", type=float, metavar="S", help="Seconds for which agents outlive the daemon.  [default: 900]")
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

    The daemon attaches to processes that match the rules of its configuration, to processes with HOOKD=1 in their
    environment, and on request of `hookd attach PID`. Existing agents, of an earlier daemon or of `hookd run`, are found
    at once.
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
