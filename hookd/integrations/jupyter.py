"""The notebook magics `%hookd` and `%%hookd`, loaded by `%load_ext hookd`."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.display import display

import hookd
from hookd.integrations.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

EVERY_S = 1.0
"""Seconds between two updates of the table while a cell runs."""


@magics_class
class HookdMagics(Magics):  # type: ignore[misc]
    """The magics of one shell, with the observation that they have started."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._observation: hookd.Observation | None = None

    @line_cell_magic  # type: ignore[untyped-decorator]
    def hookd(self, line: str, cell: str | None = None) -> None:
        """Observe this kernel, and show what was seen.

        %hookd                     start, or show where things stand
        %hookd nan:every=1 memory  start with these plugins instead of the usual ones
        %hookd stop                stop, and show the last of it
        %%hookd                    run a cell with a table above it that is renewed each second
        """
        try:
            if line.strip() == "stop":
                self._stop()
                return
            self._begin(line.split())
            if cell is None:
                display(Table(hookd.read()))
            else:
                self._run(cell)
        except hookd.HookdError as exc:
            raise UsageError(f"hookd: {exc.message}" + (f"\n{exc.hint}" if exc.hint else "")) from None

    def _begin(self, words: list[str]) -> None:
        if self._observation is None or not self._observation.is_on:
            self._observation = hookd.observe([_plugin(word) for word in words]) if words else hookd.observe()
            self._observation.begin()
        elif words:
            raise UsageError("hookd: this kernel is already observed; run `%hookd stop` first")

    def _stop(self) -> None:
        if self._observation is None or not self._observation.is_on:
            raise UsageError("hookd: `%hookd` has not started anything here")
        self._observation.end()
        if self._observation.report is not None:
            display(Table(self._observation.report))

    def _run(self, cell: str) -> None:
        if getattr(self.shell, "kernel", None) is None:  # a terminal, which cannot update its output
            result = self.shell.run_cell(cell)
            display(Table(hookd.read()))
        else:
            with _live():
                result = self.shell.run_cell(cell)
        if not result.success:
            raise UsageError("hookd: the cell failed")  # so that a run of the whole notebook stops here


@contextlib.contextmanager
def _live() -> Iterator[None]:
    """Show a table, and update it from a separate thread until the block ends."""
    shown = display(Table(hookd.read()), display_id=True)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(EVERY_S):
            with contextlib.suppress(hookd.HookdError):  # the cell may have stopped the agent
                shown.update(Table(hookd.read()))

    thread = threading.Thread(target=renew, name="hookd-table", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(hookd.HookdError):
            shown.update(Table(hookd.read()))


def _plugin(word: str) -> tuple[str, dict[str, object]]:
    """Parse `nan:every=1,neginf=true`, as after `hookd attach -p`."""
    name, _, rest = word.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if rest]
    if bad := next((key for key, equals, _ in pairs if not (key and equals)), None):
        raise UsageError(f"hookd: options are NAME=VALUE, not {bad!r}")
    return name, {key: value for key, _, value in pairs}
