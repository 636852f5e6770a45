"""A real Prometheus that by default scrapes one daemon twice a second."""

from __future__ import annotations

import json
import shutil
import socket
import urllib.error
import urllib.parse
import urllib.request

import pytest

from tests.support.environment import target_environment
from tests.support.processes import Process, wait_until

CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs:
  - job_name: hookd
    static_configs: [{{targets: ["{address}"]}}]
"""


class Prometheus:
    """A server of its own: data, port and configuration.

    `config` is one in place of the usual, `own` an address in place of a free one here, `around` a command that becomes it.
    """

    def __init__(self, directory, address, config=None, own=None, around=()):
        directory.mkdir(exist_ok=config is not None)
        (directory / "prometheus.yml").write_text(config or CONFIG.format(address=address))
        self.address = own or _free_address()
        command = [
            *around, "prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
            f"--web.listen-address={self.address}", "--log.level=warn",
        ]  # fmt: skip
        self.process = Process(command, env=target_environment())

    def is_ready(self):
        assert self.process.popen.poll() is None, self.process.describe()
        try:
            return self._get("/-/ready")
        except urllib.error.HTTPError as error:
            error.close()
        except urllib.error.URLError:
            pass
        return ""

    def _get(self, path, **parameters):
        url = f"http://{self.address}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.read().decode()

    def query(self, expression):
        """Return the labels and the value of each series of an instant query."""
        answer = json.loads(self._get("/api/v1/query", query=expression))
        assert answer["status"] == "success", answer
        return [(one["metric"], float(one["value"][1])) for one in answer["data"]["result"]]

    def value(self, expression):
        """Return the value of a query that has one result, else None."""
        found = self.query(expression)
        return found[0][1] if len(found) == 1 else None

    def labels(self, expression, start, end, step_s):
        """Return the labels of each series that has a number, of a query over a range of seconds since 1970."""
        answer = json.loads(self._get("/api/v1/query_range", query=expression, start=start, end=end, step=step_s))
        assert answer["status"] == "success", answer
        return [one["metric"] for one in answer["data"]["result"] if any(value != "NaN" for _, value in one["values"])]


def _free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def is_there():
    return shutil.which("prometheus") is not None and shutil.which("promtool") is not None


def started(stack, directory, url, config=None):
    """Start a server for the daemon at a URL; it ends with `stack`. Skip the test if there is none."""
    if not is_there():
        pytest.skip("Prometheus is not installed here (Debian: apt install prometheus)")
    server = Prometheus(directory, url.partition("://")[2], config)
    stack.callback(server.process.close)
    wait_until(server.is_ready, what="Prometheus")
    return server
