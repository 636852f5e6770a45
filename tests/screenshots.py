"""Make the pictures of docs/screenshots from real runs: `make screenshots`, or `python -m tests.screenshots NAME…`.

Two jobs train for a while: one of two ranks, and one that a plugin changes and that has had a NaN. A picture is a
function below that takes the scene and returns the bytes of a file; PICTURES has their names.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from tests.support import training
from tests.support.browser import Visit, chromium
from tests.support.daemon import Daemon
from tests.support.environment import REPOSITORY, TARGETS, bare_python
from tests.support.processes import Process, wait_until
from tests.support.terminal import Terminal
from tests.support.tool import HOOKD, hookd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, ColorScheme, Page

PLACE = REPOSITORY / "docs" / "screenshots"
EXAMPLE = REPOSITORY / "examples" / "train.py"
WIDTH = 1200
MOST_BYTES = 150_000
JOB, LONE = "pretrain-bytes", "finetune-clipped"
PLUGINS = ("nan", "activations", "timing", "gradclip:max_norm=1.0")
"""The second job's."""


@dataclass(frozen=True)
class Scene:
    """The subjects of the pictures.

    Attributes:
        daemon: the daemon that serves both jobs.
        browser: the browser that takes the pictures.
        ranks: the processes of the job of two ranks.
        lone: the process of the other job.
    """

    daemon: Daemon
    browser: Browser
    ranks: list[Process]
    lone: Process


@contextlib.contextmanager
def _page(scene: Scene, path: str, height: int = 800, scheme: ColorScheme = "light") -> Iterator[Page]:
    visit = Visit(scene.browser, scene.daemon.url, viewport={"width": WIDTH, "height": height}, color_scheme=scheme)
    try:
        yield visit.go(path)
        assert not visit.wrong, visit.wrong
    finally:
        visit.close()


def page(scene: Scene) -> bytes:
    with _page(scene, "/") as found:
        return found.screenshot()


def page_dark(scene: Scene) -> bytes:
    with _page(scene, "/", scheme="dark") as found:
        return found.screenshot()


def run(scene: Scene) -> bytes:
    with _page(scene, f"/run/{JOB}", 880) as found:
        return found.screenshot()


def modules(scene: Scene) -> bytes:
    with _page(scene, f"/run/{JOB}") as found:
        return _modules(found)


def modules_dark(scene: Scene) -> bytes:
    """Return the gradients of the run in which they are clipped."""
    with _page(scene, f"/run/{LONE}?view=gradients", scheme="dark") as found:
        return _modules(found)


def _modules(found: Page) -> bytes:
    """Return the heat map with two blocks open, and a margin around it."""
    for block in (0, 2):
        found.locator("#modules summary:has(small:text-is('Block'))").nth(block).click()
    found.locator("#modules h2").hover()
    top, height = found.locator("#modules").evaluate(
        "one => [one.getBoundingClientRect().top + scrollY, one.offsetHeight]"
    )
    edge = 20
    clip = {"x": 0, "y": top - edge, "width": WIDTH, "height": height + edge + 6}
    return found.screenshot(full_page=True, clip=clip)


def incident(scene: Scene) -> bytes:
    rows = scene.daemon.client.incidents(run=LONE, kind="nan")
    with _page(scene, f"/incident/{rows[0]['id']}", 1000) as found:
        return found.screenshot()


def report(scene: Scene) -> bytes:
    """Return the page that `hookd report --html` writes to be sent."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "report.html"
        hookd("report", str(scene.lone.pid), "--html", file, "--host", f"unix://{scene.daemon.client.path}")
        shown = scene.browser.new_page(viewport={"width": WIDTH, "height": 1000})
        try:
            shown.goto(file.as_uri())
            return shown.screenshot()
        finally:
            shown.close()


def top(scene: Scene) -> bytes:
    return _terminal(scene, lambda seen: sum("running" in line for line in seen) == 3)


def top_modules(scene: Scene) -> bytes:
    return _terminal(scene, lambda seen: "%" in seen[4] and "q quit" in seen[-1], str(scene.ranks[0].pid))


def _terminal(scene: Scene, is_there: Callable[[list[str]], bool], *words: str) -> bytes:
    """Return `hookd top` as a terminal of 100 columns shows it, in colour."""
    with tempfile.TemporaryDirectory() as directory, Terminal(Path(directory), 100, 20, NO_COLOR="") as terminal:
        terminal.type(shlex.join([*HOOKD, "top", *words, "--host", f"unix://{scene.daemon.client.path}"]))
        terminal.wait(is_there)
        time.sleep(3)  # rates need some intervals
        screen = terminal.tmux("capture-pane", "-p", "-e")
    paper = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    paper.print(Text.from_ansi(screen), no_wrap=True, crop=False)
    html = paper.export_html(theme=MONOKAI, inline_styles=True, code_format=_PAPER)
    shown = scene.browser.new_page(viewport={"width": WIDTH, "height": 800})
    try:
        shown.set_content(html)
        return shown.locator("pre").screenshot()
    finally:
        shown.close()


_PAPER = """<body style="margin: 0"><pre style="margin: 0; padding: 14px; display: inline-block; font: 15px/1.35 DejaVu Sans
Mono, monospace; color: {foreground}; background: {background}">{code}</pre></body>"""

PICTURES = {
    "top.png": top, "top-modules.png": top_modules,
    "page.png": page, "page-dark.png": page_dark, "run.png": run, "modules.png": modules,
    "modules-dark.png": modules_dark, "incident.png": incident, "report.png": report,
}  # fmt: skip


@contextlib.contextmanager
def scene(directory: Path, seconds: float) -> Iterator[Scene]:
    """Start the daemon and the jobs, attach, and let them train for a while."""
    with contextlib.ExitStack() as stack:
        shutil.copy(EXAMPLE, directory / "train.py")  # a path of this machine has no place in a picture
        shutil.copy(TARGETS / "pictured.py", directory / "train_ddp.py")
        browser = stack.enter_context(chromium())  # its start would be a spike in the curves
        daemon = Daemon(directory)
        stack.callback(daemon.process.close)
        ranks = [stack.enter_context(_rank(directory, rank)) for rank in range(2)]
        command = [bare_python(), "train.py", "--seed", "3"]
        lone = stack.enter_context(Process(command, env=training.environment(HOOKD_RUN=LONE), cwd=directory))
        for rank, process in enumerate(ranks):
            process.expect(f"^rank {rank} trains$")
        lone.expect("^step 5 ")
        host = ("--host", f"unix://{daemon.client.path}", "--timeout", "60")
        hookd("attach", *(str(one.pid) for one in ranks), *host)
        plugins = [word for one in PLUGINS for word in ("-p", one)]
        hookd("attach", str(lone.pid), *plugins, *host)
        time.sleep(seconds)
        lone.signal(signal.SIGUSR1)
        nan = f"/v1/incidents?run={LONE}&kind=nan"
        wait_until(lambda: daemon.client.request("GET", nan)["incidents"], what="the NaN")
        time.sleep(10)
        yield Scene(daemon, browser, ranks, lone)


def _rank(directory: Path, rank: int) -> Process:
    environ = training.environment(HOOKD_RUN=JOB, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    return Process([bare_python(), "train_ddp.py", "train.py", directory / "store"], env=environ, cwd=directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], help="which; all by default")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long the jobs train before")
    asked = parser.parse_args()
    PLACE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, scene(Path(directory), asked.seconds) as found:
        for name in asked.names or PICTURES:
            picture = PICTURES[name](found)
            (PLACE / name).write_bytes(picture)
            print(f"{name}: {len(picture) / 1e3:.0f} kB", file=sys.stderr)
            assert len(picture) <= MOST_BYTES, f"{name} is larger than {MOST_BYTES} bytes"


if __name__ == "__main__":
    main()
