"""The cost of a fleet's series in a Prometheus that scrapes all of its daemons every 15 s.

    python -m tests.bench --only fleet_cost

`hookd attach` serves one real training, a model of 400 modules with the default plugins. What it serves is served again for
each simulated rank, eight on a node, with another rank and other values at each scrape; of ranks that do not serve their
modules without these. A real Prometheus, with hookd's rules, scrapes every node under an address of its own. Memory, processor
and write-ahead log are those that the Prometheus process reports or has written, over the last two thirds of the time.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.bench import deep
from tests.bench.tables import Report, Table
from tests.support.environment import REPOSITORY, bare_python, target_environment
from tests.support.processes import Process, wait_until
from tests.support.prometheus import Prometheus
from tests.support.tool import Attachment

if TYPE_CHECKING:
    from collections.abc import Iterator

TITLE = "What a fleet costs Prometheus"
MODULES = 400
A_NODE = 8
"""Ranks of a node."""
INTERVAL_S = 15
LASTS_S = 300
SIZES = ((1, "rank 0"), (64, "rank 0"), (1000, "rank 0"), (1000, "one rank of each node"), (1000, "every rank"))
"""Numbers of ranks, and which of them serve their modules."""
_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
CONFIG = """
global: {{scrape_interval: {interval}s, scrape_timeout: 10s, evaluation_interval: {interval}s}}
rule_files: [{rules}/*.rules.yml]
scrape_configs:
  - job_name: hookd
    static_configs:
{nodes}
"""
_NODE = '      - {{targets: ["{address}"], labels: {{__metrics_path__: "/{number}", instance: "node{number}"}}}}'


@dataclass(frozen=True)
class Line:
    """A sample of the real target, before and after its rank."""

    name: str
    labels: str
    value: float
    is_of_module: bool
    is_own: bool
    """Whether it is about the daemon."""


def lines_of(text: str) -> list[str | Line]:
    """Return the samples of a scrape, and its comments as they are."""
    found: list[str | Line] = []
    for line in text.splitlines():
        if line.startswith("#"):
            found.append(line)
        elif (match := _SAMPLE.fullmatch(line)) is not None:
            labels = match[2] or ""
            rest = re.sub(r'\brank="[^"]*",?|\brun="[^"]*",?', "", labels).rstrip(",")
            is_own = 'rank="' not in labels
            found.append(Line(match[1], labels if is_own else rest, float(match[3]), 'module="' in labels, is_own))
    return found


def rendered(lines: list[str | Line], serving: dict[int, bool], scrape: int) -> str:
    """Return what a node serves.

    Args:
        lines: of the real target.
        serving: the node's ranks, and whether each serves its modules.
        scrape: the number of the scrape; values grow with it.
    """
    shown = []
    for line in lines:
        if isinstance(line, str):
            shown.append(line)
        elif line.is_own:
            shown.append(f"{line.name}{f'{{{line.labels}}}' if line.labels else ''} {line.value!r}")
        else:
            more = f",{line.labels}" if line.labels else ""
            shown += [
                f'{line.name}{{run="train.py@3fa29b1c",rank="{rank}"{more}}} {line.value * (1 + scrape / 1000 + rank / 1e6)!r}'
                for rank, is_serving in serving.items()
                if is_serving or not line.is_of_module
            ]
    return "\n".join(shown) + "\n"


@contextlib.contextmanager
def served(lines: list[str | Line], ranks: int, who: str) -> Iterator[tuple[str, int]]:
    """Serve the nodes; yield their address and their number."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            node = int(self.path.strip("/"))
            own = range(node * A_NODE, min(ranks, (node + 1) * A_NODE))
            serving = {rank: rank == 0 or who == "every rank" or (who != "rank 0" and rank == own[0]) for rank in own}
            body = rendered(lines, serving, int(time.monotonic() // INTERVAL_S) % 1000).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", -(-ranks // A_NODE)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def measure(lines: list[str | Line], ranks: int, who: str, lasts_s: float) -> list[str]:
    """Return a row of the table."""
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hookd-fleet-cost-")))
        address, nodes = stack.enter_context(served(lines, ranks, who))
        listed = "\n".join(_NODE.format(address=address, number=number) for number in range(nodes))
        config = CONFIG.format(interval=INTERVAL_S, rules=REPOSITORY / "deploy" / "prometheus" / "rules", nodes=listed)
        server = Prometheus(home, "", config)
        stack.callback(server.process.close)
        wait_until(server.is_ready, what="Prometheus")
        process, wal = psutil.Process(server.process.pid), home / "data" / "wal"
        time.sleep(lasts_s / 3)
        cpu_s, written, begun = sum(process.cpu_times()[:2]), _bytes(wal), time.monotonic()
        rss = 0
        while time.monotonic() < begun + 2 * lasts_s / 3:
            time.sleep(1)
            rss = max(rss, process.memory_info().rss)
        took_s = time.monotonic() - begun
        up, samples = (server.value(query) for query in ("sum(up)", 'sum(scrape_samples_scraped{job="hookd"})'))
        assert up == nodes, f"{up} of {nodes} nodes were scraped"
        series = server.value("count({__name__=~'.+'})")
        cpu = (sum(process.cpu_times()[:2]) - cpu_s) / took_s
        return [
            f"{ranks:,}", who, f"{samples or 0:,.0f}", f"{series or 0:,.0f}", f"{rss / 1e6:,.0f}", f"{100 * cpu:.1f}",
            f"{(_bytes(wal) - written) / took_s * 3600 / 1e6:,.0f}",
        ]  # fmt: skip


def _bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def captured() -> list[str | Line]:
    """Return what is served of a real training."""
    with tempfile.TemporaryDirectory(prefix="hookd-fleet-cost-") as home:
        command = [bare_python(), deep.__file__, str(MODULES), Path(home, "steps")]
        with Process(command, env=target_environment(), stdin=True) as training:
            training.expect("^ready$", timeout_s=600)
            with Attachment([training.pid]) as attachment:
                wait_until(
                    lambda: attachment.metrics().total("hookd_modules", state="observed") == MODULES, 300, "its modules"
                )
                wait_until(lambda: attachment.metrics().total("hookd_steps_total") > 200, 300, "its steps")
                lines = lines_of(attachment.metrics().text)
                attachment.detach()
            training.send("")
            training.wait()
    return lines


def report(*, quick: bool = False) -> Report:
    """Measure each size."""
    lines = captured()
    sizes = SIZES[:2] if quick else SIZES
    rows = [measure(lines, ranks, who, 60 if quick else LASTS_S) for ranks, who in sizes]
    columns = ["ranks", "modules of", "series served", "series, with the rules'", "memory, MB", "a processor, %", "log, MB an hour"]  # fmt: skip
    return Report([Table("A Prometheus that scrapes every 15 s", columns, rows)])
