"""A real `hookd serve`, and commands to the processes that hold pages for it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

from hookd.errors import DaemonNotRunning
from hookd.tool.daemon.client import DaemonClient
from tests.support.environment import tool_environment
from tests.support.processes import PATIENCE_S, Process, wait_until
from tests.support.tool import HOOKD, Metrics, start_hookd


class Daemon:
    """`hookd serve` with everything in a directory of its own; `around` is a command that becomes it."""

    def __init__(self, directory, *arguments, around=(), cwd=None, **environment):
        self.client = DaemonClient(directory / "control.sock")
        state = ("--state-dir", directory / "state", "--control", self.client.path)
        words = ("serve", "--listen", "127.0.0.1:0", *state, *arguments)
        environment = {"HOOKD_POLL_S": "0.1", "HOOKD_SCAN_S": "0.1", **environment}
        if around:
            self.process = Process([*around, *HOOKD, *words], env=tool_environment(**environment), cwd=cwd)
        else:
            self.process = start_hookd(*words, cwd=cwd, **environment)
        wait_until(self.answers, what="the daemon")
        self.url = self.client.status()["url"]
        wait_until(self.is_ready, what="its first look for targets")

    def answers(self):
        assert self.process.popen.poll() is None, self.process.describe()
        try:
            return self.client.version()
        except DaemonNotRunning:
            return None

    def is_ready(self):
        try:
            return "is ready" in self.get("/-/ready")
        except urllib.error.HTTPError as error:
            error.close()
            return False

    def get(self, path, timeout_s=PATIENCE_S, **headers):
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, headers=headers), timeout=timeout_s
        ) as answer:
            return answer.read().decode()

    def metrics(self):
        return Metrics(self.get("/metrics"))

    def rows(self, run):
        return [row for row in self.client.targets() if row["run"].partition("~")[0] == run]


def tell(holder, **verb):
    holder.ask(json.dumps(verb), "done")
