"""The `hookd` command as a user runs it, its metrics endpoint, and the pages that it reads."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import urllib.request
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from hookd.errors import NoSuchTarget
from hookd.wire.labels import is_called
from tests.support import forked, outputs, outside
from tests.support.environment import tool_environment
from tests.support.processes import PATIENCE_S, Process, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from typing_extensions import Self

    from hookd.wire.page import PageReader, Snapshot

HOOKD = (sys.executable, "-m", "hookd")


def start_hookd(*arguments: str | Path, cwd: Path | None = None, stdin: bool = False, **extra: str | Path) -> Process:
    """Start a `hookd` command, forked where its imports are done."""
    return Process([*HOOKD, *arguments], env=tool_environment(**extra), cwd=cwd, stdin=stdin, popen=forked.start)


def hookd(*arguments: str | Path, status: int = 0, **extra: str | Path) -> str:
    """Run a command to its end; return its stdout."""
    with start_hookd(*arguments, **extra) as process:
        assert process.wait() == status, process.describe()
        printed = "\n".join(process.out)
        outputs.check(arguments, printed)
        return printed


def hookd_json(*arguments: str | Path) -> Any:
    return json.loads(hookd(*arguments, "--json"))


def run(*arguments: str | Path, program: Iterable[str | Path], stdin: bool = False, **extra: str | Path) -> Process:
    """Start a program under `hookd run`."""
    return start_hookd("run", *arguments, "--", *program, stdin=stdin, **extra)


def script_of(run: str) -> str:
    """Return the name of a run without its tag."""
    return run.rpartition("@")[0]


class Metrics:
    """One scrape: `metrics["hookd_steps_total", {"rank": "0"}]` sums the series that have these labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def select(self, name: str, **labels: str) -> list[Any]:
        """Return the samples with these labels; a run may be called by its name without the tag."""
        run = labels.pop("run", None)
        of_run = [s for s in self.samples if run is None or is_called(s.labels.get("run", ""), run)]
        return [s for s in of_run if s.name == name and labels.items() <= s.labels.items()]

    def total(self, name: str, **labels: str) -> float:
        return sum(s.value for s in self.select(name, **labels))

    def labels(self, name: str, label: str, **labels: str) -> set[str]:
        return {s.labels[label] for s in self.select(name, **labels)}


class Attachment:
    """`hookd attach PID… --listen 127.0.0.1:0` in the foreground: its targets' metrics, until it is interrupted."""

    def __init__(self, pids: Iterable[int], *arguments: str | Path, **extra: str | Path) -> None:
        pids = tuple(pids)
        self._before = {pid: outside.state(pid) for pid in pids}
        patient = ("--timeout", "120")  # what the arguments say comes later, and wins
        listen = ("--listen", "127.0.0.1:0")
        self.process = start_hookd("attach", *map(str, pids), *listen, *patient, *arguments, **extra)
        try:
            self.url = self.process.expect(r"http://[\w.:]+:[1-9]\d*").group()
        except BaseException:
            self.process.close()
            raise

    def metrics(self) -> Metrics:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            return Metrics(answer.read().decode())

    def detach(self) -> None:
        """Press Ctrl-C: it detaches and exits 0, and its targets are as they were."""
        self.process.signal(signal.SIGINT)
        self.process.finish(PATIENCE_S)
        if "--keep" not in self.process.command:
            for pid, before in self._before.items():
                outside.assert_same(pid, before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.close()


class Page:
    """The page of a target, held open so that it can still be read when the target has ended."""

    def __init__(self, reader: PageReader) -> None:
        self.reader = reader

    @classmethod
    def of(cls, pid: int) -> Page | None:
        from hookd.tool.attach.discover import find_page
        from hookd.wire.page import PageReader

        fd = find_page(pid)
        return None if fd is None else cls(PageReader(fd))

    @classmethod
    def below(cls, process: Process, timeout_s: float = PATIENCE_S) -> Page:
        """Wait for the page of a process or of one of its descendants, and return it."""

        def search() -> Page | None:
            assert process.popen.poll() is None, f"ended without a page: {process.describe()}"
            with contextlib.suppress(NoSuchTarget):  # a child has ended meanwhile
                return next(filter(None, map(cls.of, family_of(process.pid))), None)
            return None

        return wait_until(search, timeout_s, f"the page of {process.describe()}")

    def read(self) -> Snapshot:
        return self.reader.read()

    def values(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return the first cell of every series, by family name and label values."""
        found: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        for family in self.read().families:
            for series in family.series:
                found[family.name][series.values] = series.cells[0]
        return found

    def close(self) -> None:
        self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def has_page(pid: int) -> bool:
    """Whether a process has an agent."""
    from hookd.tool.attach.discover import find_page

    fd = find_page(pid)
    if fd is not None:
        os.close(fd)
    return fd is not None


def family_of(pid: int) -> list[int]:
    """Return a process and all its descendants, as far as they still live."""
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def plugin_options(names: Iterable[str]) -> list[str]:
    """Return `-p NAME` for each name."""
    return [part for name in names for part in ("-p", name)]


def first_number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found, f"nothing like {pattern!r} in {text!r}"
    return int(found.group(1))
