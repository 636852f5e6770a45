"""The reactions of `hookd top` to keys and clicks, to the size of the screen, and to hostile text: without a terminal."""

from __future__ import annotations

import math

import pytest
from rich.cells import cell_len
from textual.events import MouseScrollDown, MouseScrollUp

from hookd.tool.cli.top import cells, node_table
from hookd.tool.cli.top.module_table import COLUMNS
from hookd.tool.cli.top.plain import lines as plain_lines
from hookd.tool.cli.top.state import State
from hookd.tool.cli.top.table import fitting
from tests.support.top import NAMES, Job, Still, named, on_screen, opened_state, press, resized, shown, text_of

HOSTILE = [
    "\x1b]0;owned\x07\x1b[2J", "line\nbreak\ttab\r", "é" + "\u0301" * 500, "\u202egnp.exe", "\u05d0\u05d1\u05d2",
    "宽" * 200, "x" * 10_000, "\U0001f600 [bold]red[/]", "\u200b\u200d", "\x9b31m", "",
]  # fmt: skip


@pytest.fixture
def job(stack):
    return Job(stack)


@pytest.fixture
def opened(job):
    return opened_state(job)


# Keys


def test_the_cursor_moves_and_stays_with_its_row(opened):
    press(opened, "end")
    last = opened.view.table.names[opened.view.row]
    press(opened, "I")
    assert opened.view.table.names[opened.view.row] == last
    assert opened.view.at < 2
    press(opened, "home", "down", "down", "up")
    assert opened.view.at == 1
    press(opened, "pageup", "pageup")
    assert opened.view.at == 0


def test_the_window_follows_the_cursor(opened):
    press(opened, "end")
    text = shown(opened, 80, 11)
    assert [line.split()[0] for line in text[4:9]] == named(opened)[-5:]


def test_columns_are_sorted_by_in_turn(opened):
    press(opened, "<", "<")
    assert opened.view.key == "module"
    assert named(opened)[:3] == ["(root)", "blocks", "blocks.0"]
    assert named(opened).index("blocks.10") > named(opened).index("blocks.1")
    press(opened, "o", "f6", ">", ">")
    assert opened.view.key == "forward_share"
    press(opened, "I")
    assert named(opened)[0] in ("blocks", "blocks.10")


def test_a_filter_shows_what_contains_it_and_esc_clears_it(opened):
    text = shown(opened, keys=("/", *"ATTN"))
    assert named(opened) == ["blocks.0.attn", "blocks.1.attn"]
    assert text[-2].startswith("/ATTN_")
    opened.view.filter("")
    assert press(opened, "/", *"ATTN", "backspace", "enter", "q") == 0
    assert shown(opened)[-2] == "/ATT"
    press(opened, "escape")
    assert len(named(opened)) == len(NAMES)
    assert "no row contains this text" in shown(opened, keys=("/", *"nowhere"))[-3]
    assert "RUN" in shown(opened, keys=("escape", "escape"))[1]


def test_letters_are_the_filters_while_it_is_typed(opened):
    assert press(opened, "/", *"qth?<", "space", "enter") is None
    assert opened.view.pattern == "qth?< "
    assert (opened.view.is_tree, opened.view.key) == (False, "share")


def test_the_tree_keeps_what_a_filters_rows_are_in(opened):
    lines = shown(opened, keys=("t", "/", *"attn", "enter"))
    assert named(opened) == ["(root)", "blocks", "blocks.0", "blocks.0.attn", "blocks.1", "blocks.1.attn"]
    assert lines[5].startswith("  blocks")
    assert lines[7].startswith("      attn")


def test_a_module_of_the_tree_hides_its_submodules_and_shows_them_again(opened):
    text = shown(opened, keys=("t", "down", "left"))
    assert named(opened) == ["(root)", "blocks", "head"]
    assert text[5].startswith("  blocks +5 ")
    press(opened, "/", *"attn", "enter")
    assert "blocks.0.attn" in named(opened)  # a filter shows its matches
    press(opened, "escape", "left")
    assert opened.view.at == 0  # nothing is left to collapse: it goes to the parent
    press(opened, "down", "right", "down", "enter")
    assert "blocks.0" in named(opened)
    assert "blocks.0.attn" not in named(opened)
    press(opened, "enter")
    assert set(named(opened)) == set(NAMES)


def test_a_pause_reads_nothing_and_moves_on(opened, job):
    text = shown(opened, keys=("p", "down"))
    assert opened.is_paused
    assert "paused" in text[0]
    before = job.target.read_at
    press(opened, "p")
    assert not opened.is_paused
    assert job.target.read_at != before


def test_the_interval_grows_and_shrinks(opened):
    press(opened, "+", "+")
    assert opened.interval_s == 5.0
    press(opened, *"-" * 9)
    assert opened.interval_s == 0.2


def test_help_covers_the_table_until_a_key(opened):
    text = shown(opened, keys=("h",))
    assert "q  F10 Ctrl-C   quit" in "\n".join(text)
    assert all("…" not in line for line in text)
    assert "(root)" in "\n".join(shown(opened, keys=("h", "t")))
    assert not opened.view.is_tree  # the key went to the help
    assert press(opened, "?", "q") == 0
    assert press(opened, "?", "ctrl+c") == 130


def test_a_help_that_does_not_fit_is_scrolled_and_left_by_another_key(opened):
    def seen(*keys):
        return "\n".join(shown(opened, 40, 10, ("h", *keys)))

    assert seen().startswith("Up Down PageUp")
    assert "double-click" in seen()  # the end of a line that is wider than the screen
    assert seen("down").startswith("move;")
    assert "Press any key to go back." in seen("end")
    assert seen("end", "home", "pagedown", "up", "pageup").startswith("Up Down PageUp")
    assert "(root)" in seen("down", "x")
    assert opened.view.at == 0


def test_a_refresh_behind_the_help_does_no_harm(opened):
    async def story(pilot):
        await pilot.press("h")
        pilot.app.read()
        await pilot.pause()
        assert "quit" in "\n".join(text_of(pilot.app))

    on_screen(opened, story)


# Mouse


def test_a_click_moves_the_cursor_and_the_second_one_opens(job):
    state = State(Still(job, job), 1.0)
    state.refresh(1.0)

    async def story(pilot):
        await pilot.click("TableView", offset=(20, 2))
        assert state.view.at == 1
        await pilot.click("TableView", offset=(20, 9))  # below the last row
        assert state.view.at == 1
        await pilot.click("TableView", offset=(20, 1), times=2)
        assert state.opened is not None

    on_screen(state, story)


def test_a_click_on_a_title_sorts_by_it_and_the_next_one_inverts(opened):
    async def story(pilot):
        at = text_of(pilot.app)[3].index("FWD")
        await pilot.click("TableView", offset=(at, 0))
        assert (opened.view.key, opened.view.is_inverted) == ("forward_share", False)
        await pilot.click("TableView", offset=(at, 0))
        assert (opened.view.key, opened.view.is_inverted) == ("forward_share", True)

    on_screen(opened, story)


def test_the_wheel_moves_the_cursor(opened):
    async def story(pilot):
        await pilot._post_mouse_events([MouseScrollDown], "TableView", offset=(5, 5))
        assert opened.view.at == 3
        await pilot._post_mouse_events([MouseScrollUp], "TableView", offset=(5, 5))
        assert opened.view.at == 0

    on_screen(opened, story)


def test_a_click_on_a_key_below_does_as_the_key(opened):
    async def story(pilot):
        at = text_of(pilot.app)[-1].index("t tree")
        await pilot.click("KeyLine", offset=(at, 0))
        assert opened.view.is_tree

    on_screen(opened, story)


# Room


def test_every_line_is_as_wide_as_the_terminal(opened):
    async def story(pilot):
        sizes = [(width, 24) for width in (5, 20, 21, 40, 63, 79, 80, 81, 120, 200, 500)]
        for width, height in sizes + [(80, height) for height in (2, 6, 7, 10, 60)]:
            await resized(pilot, width, height)
            text_of(pilot.app)
            await pilot.press("h")
            text_of(pilot.app)
            await pilot.press("h")

    on_screen(opened, story)


def test_columns_go_by_rank_and_never_wrap(job):
    columns = node_table.build([job.target]).columns
    assert list(fitting(columns, 80)) == list(columns)[:-2]
    assert list(fitting(columns, 120)) == list(columns)
    wide = fitting(columns, 200)
    assert wide["run"] == max(columns["run"].width, len(job.target.run)), "the rest is for what is wrong"
    assert sum(wide.values()) + len(wide) - 1 == 200
    assert list(fitting(columns, 30)) == ["pid", "run", "rank"]
    assert list(fitting(columns, 12)) == ["run"]
    assert sum(fitting(columns, 60).values()) + len(fitting(columns, 60)) - 1 == 60


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([], ""), ([math.nan], " "), ([0.0], " "), ([1.0, 2.0, math.nan, 4.0], "▃▅ █"), ([1e-9, 1e9, math.inf], "▁█ ")],
)
def test_a_history_is_a_line_of_bars(values, drawn):
    assert node_table.sparkline(values) == drawn


def test_a_narrow_title_keeps_the_state(opened):
    assert shown(opened, 40, 10)[0].endswith(": running")


def test_the_signal_that_ended_a_target_is_not_cut(job):
    table = node_table.build([job.target])
    table.values["state"][0] = "signal SIGSEGV"
    assert cells.fit(table.cell(0, "state"), table.columns["state"].width) == "SIGSEGV "


# Hostile text


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("width", [1, 2, 3, 7, 40])
def test_a_text_takes_its_columns_and_does_nothing(text, width):
    fitted = cells.fit(cells.safe(text), width)
    assert cell_len(fitted) == width
    assert fitted.isprintable()
    assert not any("\u0590" <= one <= "\u08ff" for one in fitted)


def test_both_ends_of_a_long_name_stay():
    assert cells.cut("model.decoder.layers.31.self_attn.q_proj", 21) == "model.deco…ttn.q_proj"


def test_a_page_full_of_hostile_names_draws_as_any_other(stack):
    names = [f"{text[:900]}{number}" for number, text in enumerate(HOSTILE)]
    job = Job(stack, run="\x1b[31mevil\u202e", rank="\x1b[0m", names=names)
    job.add("nan_nonfinite", [1.0] * len(names), where="\x1b[2J", kind="\x07")
    state = State(Still(job), 1.0)
    state.refresh(1.0)
    text = "\n".join(shown(state))
    state.enter()
    state.view.turn_tree()
    state.refresh(2.0)
    for width in (20, 80, 300):
        text += "\n".join(shown(state, width))
    assert all(one.isprintable() or one == "\n" for one in text)
    assert "\\u05d0" in text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e308, 5e-324])
def test_numbers_that_are_none_draw_as_any_other(job, value):
    state = State(Still(job), 1.0)

    async def story(pilot):
        for second in range(1, 4):
            job.call([value] * 8, [value] * 8, calls=value)
            for thing in ("activations_norm", "activations_zero_ratio", "memory_output_bytes", "nan_nonfinite"):
                job.add(
                    thing, [value] * 8, "gauge", **({"where": "x", "kind": "y"} if thing == "nan_nonfinite" else {})
                )
            job.step(value, value)
            state.refresh(float(second))
            await pilot.press("enter", "t")
            for _ in COLUMNS:
                pilot.app.action_sort(1)
                text_of(pilot.app)
            await pilot.press("escape")

    on_screen(state, story, 300)
    assert list(plain_lines(state.view, None))


# Without a screen


def test_a_plain_table_is_as_wide_as_what_stands_in_it(opened):
    rows = list(plain_lines(opened.view, None))
    assert rows[0].split()[0] == "MODULE"
    assert len(rows) == 1 + len(NAMES)
    assert max(map(len, plain_lines(opened.view, 60))) <= 60


def test_json_has_every_column(opened):
    rows = opened._modules.as_json()
    assert {"module", "share", "calls_per_s"} <= set(rows[0])
    assert not any(isinstance(value, float) and math.isnan(value) for row in rows for value in row.values())
