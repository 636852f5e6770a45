"""The modules of `tests/targets/importing.py` before, during and after an attach."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.support.processes import Process, wait_until
from tests.support.tool import Attachment, has_page

if TYPE_CHECKING:
    from pathlib import Path

WIDTHS = """
from hookd import Plugin, hookimpl
class Widths(Plugin):
    name = 'widths'
    @hookimpl
    def configure(self, context):
        self.calls = context.counter('calls', 'Steps that were seen.')
    @hookimpl
    def step_post(self):
        from hookd import __version__
        self.calls.inc()
"""
IMPORTED = "hookd hookd.testing hookd.integrations.table hookd_nan hookd_timing widths"


def ask(process: Process, line: str) -> Any:
    """Send one line, and return the answer."""
    return json.loads(process.ask(line, "^answer (.*)").group(1))


def lay_widths(directory: Path) -> None:
    """Write a plugin `widths` into `plugins`, and into `program` a module of the program's own that has its name."""
    for place, text in (("plugins", WIDTHS), ("program", "def of_the_program(): ...\n")):
        (directory / place).mkdir()
        (directory / place / "widths.py").write_text(text)


def assert_modules_stay(process: Process, directory: Path, *, is_first: bool) -> None:
    """Attach to a target in whose environment hookd and `widths` are installed, and detach.

    Args:
        process: the target, after it has printed that it is ready.
        directory: the one of `lay_widths`.
        is_first: whether the target imports its modules before the attach, instead of during it.
    """
    before = [ask(process, f"{word} {IMPORTED}") for word in ("import", "id")] if is_first else None
    modules = set(ask(process, "modules"))
    plugins = ["-p", "nan", "-p", "timing", "-p", "widths", "--plugin-dir", directory / "plugins"]
    with Attachment([process.pid], *plugins) as attachment:
        wait_until(
            lambda: attachment.metrics().total("hookd_widths_calls_total") >= 3, what="steps the plugin has seen"
        )
        new = {name for name in set(ask(process, "modules")) - modules if "hookd" in name or "widths" in name}
        plain = {name.partition("@")[0] for name in new}  # the part behind it comes from the plugin's directory
        assert {"_hookd.target.boot.assembly", "_hookd_hookd_nan.judge", "_hookd_widths"} <= plain
        assert all(name.startswith("_hookd") for name in new), "only private names"
        files, identities = during = [ask(process, f"{word} {IMPORTED}") for word in ("import", "id")]
        assert isinstance(files, list), files
        assert not [file for file in files if file.startswith("/hookd-payload/")]
        assert files[-1].endswith("program/widths.py")
        assert before in (during, None)
        attachment.detach()
    wait_until(lambda: not has_page(process.pid), what="the page to go")
    assert ask(process, f"id {IMPORTED}") == identities
    assert not [name for name in ask(process, "modules") if name.startswith("_hookd")]
