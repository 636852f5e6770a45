"""The screen of `hookd top`, and the actions of its keys.

It depends neither on a terminal nor on signals, so a test can press keys.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text

from hookd.tool.cli import output
from hookd.tool.cli.top import draw, node_table
from hookd.tool.cli.top.cells import cut, safe
from hookd.tool.cli.top.module_table import ModuleTable
from hookd.tool.cli.top.table import fitting
from hookd.tool.cli.top.view import View
from hookd.tool.reports.reading import is_called_only

if TYPE_CHECKING:
    from collections.abc import Callable

    from hookd.tool.cli.top.node import Node
    from hookd.tool.cli.top.target import Target

INTERVALS_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
FIRST_S = 0.5
"""Time until the second reading, before which there are no rates."""
FAR = 1 << 30
SMALLEST = (20, 6)
"""Columns and lines of the smallest usable terminal."""
NAME = 24
"""Columns of a run's name in the title."""
FOOTER = "q quit  Enter open  Esc back  / filter  < > sort  I invert  t tree  h help"


class App:
    """The state of the screen.

    Args:
        node: the targets, read at least once.
        interval_s: seconds between refreshes.
        pid: of the target whose modules are shown first.
        run: label of the run to which the list is restricted.

    Attributes:
        is_done: whether the user has quit.
        is_paused: whether reading is paused.
        due: time of the next reading, in monotonic seconds.
    """

    def __init__(self, node: Node, interval_s: float, *, pid: int | None = None, run: str | None = None) -> None:
        self.interval_s = interval_s
        self.is_done = self.is_paused = False
        self.due = time.monotonic() + min(FIRST_S, interval_s)
        self._node, self._run = node, run
        self._is_typing = self._is_help = False
        self._opened: Target | None = None
        self._modules = ModuleTable()
        self._targets = View(node_table.build(self._listed()), "run")
        self._module_view: View | None = None
        self._page = 10
        self._drawn: list[str] = []
        if pid is not None:
            self._open(next(target for target in node.targets if target.pid == pid))

    def _listed(self) -> list[Target]:
        return node_table.listed(self._node.targets, self._run)

    @property
    def view(self) -> View:
        """The view that is shown."""
        return self._module_view or self._targets

    def refresh(self, now: float) -> None:
        """Read all targets again; `now` is in monotonic seconds."""
        self._node.read(now)
        self._targets.show(node_table.build(self._listed()))
        self._show_modules()
        self.due = time.monotonic() + self.interval_s

    def _show_modules(self) -> None:
        if self._opened is None or self._opened.snapshot is None:
            return
        self._modules.take(self._opened.read_at, self._opened.snapshot)
        table = self._modules.build()
        if self._module_view is not None:
            self._module_view.show(table)

    def _open(self, target: Target) -> None:
        self._opened, self._modules = target, ModuleTable()
        if target.snapshot is None:
            self._opened = None
            return
        self._modules.take(target.read_at, target.snapshot)
        self._module_view = View(self._modules.build(), "share")
        self.due = min(self.due, time.monotonic() + FIRST_S)

    # Keys

    def press(self, key: str) -> None:
        """Run the action of a key."""
        if self._is_typing:
            self._type(key)
        elif self._is_help:
            self._is_help = False
            self.is_done = key in ("q", "f10")
        elif key in _MOVES:
            self.view.move(_MOVES[key] * (self._page if key.startswith("page") else 1))
        elif key in self._DO:
            self._DO[key](self)

    def _type(self, key: str) -> None:
        pattern = self.view.pattern
        if key == "escape":
            pattern, self._is_typing = "", False
        elif key == "enter":
            self._is_typing = False
        elif key == "backspace":
            pattern = pattern[:-1]
        elif len(key) == 1:
            pattern += key
        elif key in _MOVES:
            self.view.move(_MOVES[key])
        if pattern != self.view.pattern:
            self.view.pattern = pattern
            self.view.show(self.view.table)

    def _quit(self) -> None:
        self.is_done = True

    def _enter(self) -> None:
        row = self._targets.row
        if self._module_view is None and row is not None:
            name = self._targets.table.names[row]
            self._open(next(target for target in self._node.targets if (target.pid, target.start) == name))

    def _back(self) -> None:
        view = self.view
        if view.pattern:
            view.pattern = ""
            view.show(view.table)
        elif self._module_view is not None:
            self._module_view = self._opened = None
        elif self._run is not None:
            self._run = None
            self._targets.show(node_table.build(self._listed()))

    def _sort(self, by: int) -> None:
        self.view.sort_next(by, self._drawn or list(self.view.table.columns))

    def _invert(self) -> None:
        self.view.is_inverted = not self.view.is_inverted
        self.view.show(self.view.table)

    def _turn_tree(self) -> None:
        self.view.is_tree = not self.view.is_tree
        self.view.show(self.view.table)

    def _pause(self) -> None:
        self.is_paused = not self.is_paused
        self.due = 0.0

    def _filter(self) -> None:
        self._is_typing = True

    def _help(self) -> None:
        self._is_help = True

    def _slower(self) -> None:
        self.interval_s = next((longer for longer in INTERVALS_S if longer > self.interval_s), self.interval_s)

    def _faster(self) -> None:
        self.interval_s = next(
            (shorter for shorter in reversed(INTERVALS_S) if shorter < self.interval_s), self.interval_s
        )
        self.due = min(self.due, time.monotonic() + self.interval_s)

    def _sort_right(self) -> None:
        self._sort(1)

    def _sort_left(self) -> None:
        self._sort(-1)

    _DO: ClassVar[dict[str, Callable[[App], None]]] = {
        "q": _quit, "f10": _quit, "enter": _enter, "escape": _back, "backspace": _back, "<": _sort_left,
        ">": _sort_right, "o": _sort_right, "f6": _sort_right, "I": _invert, "t": _turn_tree, "f5": _turn_tree,
        "p": _pause, "/": _filter, "f4": _filter, "h": _help, "?": _help, "f1": _help, "+": _slower, "-": _faster,
    }  # fmt: skip

    # Lines

    def lines(self, width: int, height: int) -> list[Text]:
        """Return the screen: `height` lines of `width` columns each."""
        if width < SMALLEST[0] or height < SMALLEST[1]:
            return [draw.note("too small", width)] + [Text(" " * width)] * (height - 1)
        above = [draw.title(self._title(), self._pace(), width)]
        if self._opened is not None:
            above += [draw.note(_progress(self._opened), width), draw.note(self._phases(), width)]
        body = height - len(above) - 2
        self._page = body - 2
        self._drawn = list(fitting(self.view.table.columns, width))
        middle = draw.help_page(width, body) if self._is_help else list(draw.table(self.view, width, body))
        return [*above, *middle, draw.note(self._detail(), width, draw.QUIET), draw.note(self._footer(), width)]

    def _title(self) -> str:
        if self._opened is not None:
            target = self._opened
            name = f"{cut(safe(target.run), NAME)} rank {cut(safe(target.rank), NAME)}"
            return f"{name}, process {target.pid} of {safe(target.user)}: {safe(target.state)}"
        listed = self._listed()
        ended = sum(1 for target in listed if target.ended)
        of_run = f" of {safe(self._run)}" if self._run is not None else ""
        count = f"{len(listed) - ended} target{'s' * (len(listed) - ended != 1)}{of_run}"
        count += f", {ended} ended" if ended else ""
        return f"hookd top: {count}, {self._node.daemon}"

    def _pace(self) -> str:
        by = self.view.table.columns[self.view.key].title + (" inverted" if self.view.is_inverted else "")
        return f"by {by}, " + ("paused" if self.is_paused else f"every {self.interval_s:g} s")

    def _phases(self) -> str:
        shares = self._opened.phases() if self._opened is not None else []
        return "a step: " + ", ".join(f"{safe(name)} {share * 100:.0f} %" for name, share in shares) if shares else ""

    def _detail(self) -> str:
        row = self.view.row
        if row is not None:
            return self.view.table.detail(row)
        if self.view.pattern:
            return "no row contains this text"
        return (
            "no module has been called yet"
            if self._opened
            else "no process is attached; `hookd ps` lists those that can be"
        )

    def _footer(self) -> str:
        if self._is_typing:
            return f"/{safe(self.view.pattern)}_   (Enter keeps it, Esc clears it)"
        if self._is_help:
            return "press any key to go back"
        kept = f"[/{safe(self.view.pattern)}]  " if self.view.pattern else ""
        return kept + FOOTER


def _progress(target: Target) -> str:
    """Describe the progress of a target in one line."""
    step = target.step
    star = "" if step["is_absolute"] else " since the attach"
    cost = target.value("hookd_overhead_ratio")
    words = [f"{step['calls']} calls, no step{star}" if is_called_only(step) else f"step {step['current']}{star}"]
    words += [f"{target.steps_per_s:.3g} steps/s"] if target.steps_per_s >= 0 else []
    words += [f"{output.seconds(target.step_s)} a step"] if target.step_s > 0 else []
    words += [f"cost {output.percent(cost)}"] if cost >= 0 else []
    words += [f"loss {output.number(target.loss)}"] if not math.isnan(target.loss) else []
    return ", ".join(words)


_MOVES = {"up": -1, "down": 1, "pageup": -1, "pagedown": 1, "home": -FAR, "end": FAR}
