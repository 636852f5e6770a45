"""A training in its own process, to which hookd attaches as it does for a user."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from hookd.testing import values

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from hookd.testing.values import Sample

WORKLOAD = Path(__file__).with_name("workload.py")
PATIENCE_S = 60.0


class SubprocessTarget:
    """A training script and a `hookd attach` to it with these plugins; both end with the `with` block.

    Args:
        plugins: names, or `name:key=value,...`, as for `-p`.
        plugin_dir: directory that is searched for plugins first, as `--plugin-dir`.
        command: the training, which prints the line `ready`; by default five small layers, run with the Python of the test.

    Raises:
        AssertionError: hookd did not attach; the message has its output.
    """

    def __init__(
        self, *plugins: str, plugin_dir: Path | None = None, command: Sequence[str | Path] | None = None
    ) -> None:
        self._plugins, self._dir = plugins, plugin_dir
        self._command = [str(word) for word in command or (sys.executable, WORKLOAD)]
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self._ends.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def _begin(self) -> None:
        self.target = self._started(self._command)
        self.target.expect(r"^ready$")
        chosen = [word for plugin in self._plugins for word in ("-p", plugin)]
        if self._dir is not None:
            chosen += ["--plugin-dir", str(self._dir)]
        words = [sys.executable, "-m", "hookd", "attach", str(self.target.pid), "--listen", "127.0.0.1:0", *chosen]
        self.attached = self._started(words)
        self.url = self.attached.expect(r"http://[\w.:]+:[1-9]\d*").group()

    def _started(self, words: list[str]) -> _Process:
        return self._ends.enter_context(_Process(words))

    def samples(self) -> list[Sample]:
        """Scrape `/metrics` and return name, labels and value of each series."""
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:  # noqa: S310  (the address of our own daemon)
            text = answer.read().decode()
        return [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def assert_metrics(self, expected: Mapping[str, object], timeout_s: float = PATIENCE_S) -> None:
        """Wait until the values are as expected, see `FakeTarget.assert_metrics`.

        Raises:
            AssertionError: they still differ after `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        while True:
            try:
                return values.assert_metrics(self.samples(), expected)
            except AssertionError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.05)

    def detach(self) -> None:
        """Interrupt `hookd attach` (SIGINT), so that it detaches.

        Raises:
            AssertionError: it failed, or the training has ended too.
        """
        self.attached.popen.send_signal(signal.SIGINT)
        status = self.attached.popen.wait(PATIENCE_S)
        assert status == 0, self.attached.output()
        assert self.target.popen.poll() is None, self.target.output()


class _Process:
    """A child process whose output lines are collected; it is killed at the end."""

    def __init__(self, words: list[str]) -> None:
        self._lines: list[str] = []
        self._news = threading.Condition()
        self.popen = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self.pid = self.popen.pid
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    def _collect(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._news:
                self._lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._lines.append("(no more lines)")
            self._news.notify_all()

    def expect(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self._lines)), None)

        with self._news:
            self._news.wait_for(lambda: found() or "(no more lines)" in self._lines[-1:], PATIENCE_S)
            match = found()
        assert match is not None, f"no line like {pattern!r}: {self.output()}"
        return match

    def output(self) -> str:
        return "\n".join([f"{' '.join(self.popen.args)} ended with {self.popen.poll()}", *self._lines[-40:]])  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(PATIENCE_S)
        self._reader.join(1)
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
