"""What `hookd top` does at a key, in how much room, and with hostile text: without a terminal."""

from __future__ import annotations

import math

import pytest
from rich.cells import cell_len

from hookd.tool.cli.top import cells, node_table
from hookd.tool.cli.top.app import App
from hookd.tool.cli.top.module_table import COLUMNS
from hookd.tool.cli.top.plain import lines as plain_lines
from hookd.tool.cli.top.table import fitting
from tests.support.top import NAMES, Job, Still, named, opened_app, press, shown

HOSTILE = [
    "\x1b]0;owned\x07\x1b[2J", "line\nbreak\ttab\r", "é" + "\u0301" * 500, "\u202egnp.exe", "\u05d0\u05d1\u05d2",
    "宽" * 200, "x" * 10_000, "\U0001f600 [bold]red[/]", "\u200b\u200d", "\x9b31m", "",
]  # fmt: skip


@pytest.fixture
def job(stack):
    return Job(stack)


@pytest.fixture
def opened(job):
    return opened_app(job)


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
    shown(opened)
    press(opened, "<", "<")
    assert opened.view.key == "module"
    assert named(opened)[:3] == ["(root)", "blocks", "blocks.0"]
    assert named(opened).index("blocks.10") > named(opened).index("blocks.1")
    press(opened, "o", "f6", ">", ">")
    assert opened.view.key == "forward_share"
    press(opened, "I")
    assert named(opened)[0] in ("blocks", "blocks.10")


def test_a_filter_shows_what_contains_it_and_esc_clears_it(opened):
    press(opened, "/", *"ATTN")
    assert named(opened) == ["blocks.0.attn", "blocks.1.attn"]
    assert shown(opened)[-1].startswith("/ATTN_")
    press(opened, "backspace", "enter", "q")
    assert opened.is_done
    opened.is_done = False
    assert "[/ATT]" in shown(opened)[-1]
    press(opened, "escape")
    assert len(named(opened)) == len(NAMES)
    press(opened, "/", *"nowhere")
    assert "no row contains this text" in shown(opened)[-2]
    press(opened, "escape", "escape")
    assert "RUN" in shown(opened)[1]


def test_the_tree_keeps_what_a_filters_rows_are_in(opened):
    press(opened, "t", "/", *"attn", "enter")
    assert named(opened) == ["(root)", "blocks", "blocks.0", "blocks.0.attn", "blocks.1", "blocks.1.attn"]
    lines = shown(opened)
    assert lines[4:8][1].startswith("  blocks")
    assert lines[4:8][3].startswith("      attn")


def test_a_pause_reads_nothing_and_moves_on(opened):
    press(opened, "p", "down")
    assert opened.is_paused
    assert "paused" in shown(opened)[0]
    press(opened, "p")
    assert not opened.is_paused
    assert opened.due == 0.0


def test_the_interval_grows_and_shrinks(opened):
    press(opened, "+", "+")
    assert opened.interval_s == 5.0
    press(opened, *"-" * 9)
    assert opened.interval_s == 0.2


def test_help_covers_the_table_until_a_key(opened):
    press(opened, "h")
    assert "q  F10 Ctrl-C   quit" in "\n".join(shown(opened))
    assert all("…" not in line for line in shown(opened)[3:])
    press(opened, "x")
    assert "(root)" in "\n".join(shown(opened))
    press(opened, "?", "q")
    assert opened.is_done


# Room


@pytest.mark.parametrize("width", [20, 21, 40, 63, 79, 80, 81, 120, 200, 500])
@pytest.mark.parametrize("height", [6, 7, 10, 24, 60])
def test_every_line_is_as_wide_as_the_terminal(opened, width, height):
    shown(opened, width, height)
    press(opened, "h")
    shown(opened, width, height)
    press(opened, "h", "escape")
    shown(opened, width, height)
    shown(opened, 5, 2)


def test_columns_go_by_rank_and_never_wrap(job):
    columns = node_table.build([job.target]).columns
    assert list(fitting(columns, 80)) == list(columns)
    assert list(fitting(columns, 30)) == ["pid", "run", "rank"]
    assert list(fitting(columns, 12)) == ["run"]
    assert sum(fitting(columns, 60).values()) + len(fitting(columns, 60)) - 1 == 60


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
    app = App(Still(job), 1.0)
    app.refresh(1.0)
    text = "\n".join(shown(app))
    press(app, "enter", "t")
    app.refresh(2.0)
    for width in (20, 80, 300):
        text += "\n".join(shown(app, width))
    assert all(one.isprintable() or one == "\n" for one in text)
    assert "\\u05d0" in text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e308, 5e-324])
def test_numbers_that_are_none_draw_as_any_other(job, value):
    app = App(Still(job), 1.0)
    for second in range(1, 4):
        job.call([value] * 8, [value] * 8, calls=value)
        for thing in ("activations_norm", "activations_zero_ratio", "memory_output_bytes", "nan_nonfinite"):
            job.add(thing, [value] * 8, "gauge", **({"where": "x", "kind": "y"} if thing == "nan_nonfinite" else {}))
        job.step(value, value)
        app.refresh(float(second))
        shown(app, 300)
        press(app, "enter", "t")
        assert len(shown(app, 300)) == 24
        for _ in COLUMNS:
            press(app, ">")
        press(app, "escape")
    assert list(plain_lines(app.view, None))


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
