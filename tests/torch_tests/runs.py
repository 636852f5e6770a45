"""One of torch's test files, run in one mode to the end of its last test, whatever a test does to the process."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hookd.errors import HookdError
from tests.support.tool import Attachment, Page, hookd_json
from tests.torch_tests.program import ATTACHED, OBSERVERS, RUN, UNOBSERVED, WITHOUT_LIMIT, Program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

MOST_STARTS = 25
"""How often a file is started, each time without the tests that are done, if tests end the process."""
STAYS_S = 8.0
"""How long an agent stays if it comes and goes while the tests run."""
POLL_S = 0.1


@dataclass
class Result:
    """The results of a file's tests.

    Attributes:
        outcomes: by the test's name: passed, failed, skipped, xfailed, xpassed, error, crashed (SIGNAL), timed out.
        texts: the messages of those that did not pass, by name.
        findings: hookd's own faults: errors of plugins, lines in its log, leftovers of a detach.
        seen: sums of the agents' own figures: agents, modules, forward calls.
        changed: the objects that hookd replaces and that are different ones after the detach.
        seconds: wall time.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def read(self, page: Page) -> None:
        """Record the agent's figures, and its errors."""
        values, snapshot = page.values(), page.read()
        families = {"modules": "hookd_modules", "forward calls": "hookd_timing_forward_calls"}
        counts = {name: int(sum(values.get(family, {}).values())) for name, family in families.items()}
        for name, count in {"agents": 1, **counts}.items():
            self.seen[name] = self.seen.get(name, 0) + count
        errors = {plugin: int(count) for (plugin,), count in values.get("hookd_plugin_errors", {}).items() if count}
        states = {plugin: state for (plugin, state), is_so in values.get("hookd_plugin_state", {}).items() if is_so}
        self.findings += [f"{plugin}: {count} errors" for plugin, count in errors.items()]
        self.findings += [f"{plugin} is {state}" for plugin, state in states.items() if state != "active"]
        self.findings += [
            f"log: {line['level']}: {line['message']}"
            for line in snapshot.logs
            if line["level"] in {"warning", "error"}
        ]

    def detached(self, left: dict[str, Any]) -> None:
        """Record the answer of a detach, unless it said that everything is as before."""
        if left.get("restored") != "identity" or left.get("residue"):
            self.findings.append(f"detach: {left}")


def run(program: Program, file: str, mode: str, limit_s: float) -> Result:
    """Run a file in one of the modes.

    Args:
        limit_s: wall time for the file; a test that is running then has timed out, and later ones are absent.
    """
    result, begun = Result(), time.monotonic()
    for _ in range(MOST_STARTS):
        left_s = limit_s - (time.monotonic() - begun)
        with _Start(program, file, mode, result) as one:
            if not one.accompany(left_s):
                break
    result.seconds = time.monotonic() - begun
    return result


class _Start:
    """One start of a file, without the tests that have an outcome already."""

    def __init__(self, program: Program, file: str, mode: str, result: Result) -> None:
        self._mode, self._result = mode, result
        self._home = program.place.work / "run"
        shutil.rmtree(self._home, ignore_errors=True)
        self._home.mkdir()
        self._lines = self._home / "lines"
        self._lines.touch()
        (self._home / "done").write_text("\n".join(result.outcomes))
        self._process = program.start(file, mode, self._home)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def accompany(self, limit_s: float) -> bool:
        """Stay until the process ends.

        Returns:
            Whether it ended in the middle of a test, so that there may be others left.
        """
        end = time.monotonic() + limit_s
        if self._mode in UNOBSERVED:
            self._until("ended", end)
        elif self._until("collected", end):
            self._come_and_go(end) if self._mode == ATTACHED else self._stay(end)
        if self._at("ended"):
            self._process.wait()
        return self._conclude()

    # -- seen from outside

    def _stay(self, end: float) -> None:
        """Read, at the end, the figures of the agent of the process itself."""
        with Page.below(self._process) as page:
            self._go("collected")
            if self._until("finished", end) and self._mode == RUN:
                self._result.detached(hookd_json("detach", str(self._pid()))["targets"][0])
            self._go("finished")
            self._until("ended", end)
            self._result.read(page)

    def _come_and_go(self, end: float) -> None:
        """Attach before the first test, and then attach and detach again and again while tests run."""
        while not self._at("finished") and self._is_running() and time.monotonic() < end:
            try:
                with self._attached() as page:
                    self._go("collected")
                    self._until("finished", min(end, time.monotonic() + STAYS_S))
                    self._result.read(page)
            except (AssertionError, HookdError) as exc:
                if not self._is_running():  # a test has ended the process, and with it the attach
                    break
                self._result.findings.append(f"attach: {exc}")
        self._go("finished")
        self._until("ended", end)

    @contextlib.contextmanager
    def _attached(self) -> Iterator[Page]:
        """Attach during the block.

        Raises:
            AssertionError: the attach or the detach has failed; the text is the tool's output.
        """
        with Attachment([self._pid()], *OBSERVERS, **WITHOUT_LIMIT) as attachment:
            attachment.process.expect("stopped for|never stopped")
            page = Page.of(self._pid())
            assert page is not None, attachment.process.describe()
            with page:
                yield page
            attachment.detach()

    def _is_running(self) -> bool:
        return self._process.popen.poll() is None

    def _go(self, moment: str) -> None:
        (self._home / f"go-{moment}").touch()

    # -- the recorder's lines

    def _read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._lines.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def _at(self, moment: str) -> bool:
        return any(line.get("at") == moment for line in self._read())

    def _pid(self) -> int:
        return next(line["pid"] for line in self._read() if line.get("at") == "collected")

    def _until(self, moment: str, end: float) -> bool:
        """Wait for a moment; return False if the process or the time ends before it."""
        while self._is_running() and time.monotonic() < end and not self._at(moment):
            time.sleep(POLL_S)
        return self._at(moment)

    def _conclude(self) -> bool:
        running = ""
        for line in self._read():
            running = line.get("begins", running)
            self._take(line)
        if self._at("finished"):
            return False
        if not running:
            self._result.findings.append(f"no test has run: {self._process.describe()}")
            return False
        status = self._process.popen.poll()
        self._result.outcomes[running] = "timed out" if status is None else f"crashed ({_ended(status)})"
        self._result.texts[running] = "\n".join([*self._process.out[-5:], *self._process.err[-80:]])
        return status is not None

    def _take(self, line: dict[str, Any]) -> None:
        result = self._result
        if "begins" in line:
            result.outcomes.setdefault(line["begins"], "passed")
        elif "name" in line:
            result.outcomes[line["name"]] = _outcome(line)
            if line["text"]:
                result.texts[line["name"]] = line["text"]
        elif "changed" in line and self._mode != RUN:  # there, hookd has started before the recorder
            result.changed = sorted({*result.changed, *line["changed"]})
        elif line.get("left"):
            result.findings.append(f"left behind: {line['left']}")
        elif "stopped" in line:
            result.detached(line["stopped"])


def _outcome(line: dict[str, Any]) -> str:
    if line["outcome"] == "failed" and line["when"] != "call":
        return "error"
    return {"xskipped": "xfailed"}.get(line["outcome"], line["outcome"])


def _ended(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
