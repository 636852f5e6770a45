"""The parts of the dashboards: queries, panels, variables. A panel is a builder of grafana-foundation-sdk.

Queries use three kinds of variables: `NODES`, `RANKS` and `MODULES` are the matchers of a person's choices on a dashboard,
`$__rate_interval` is Grafana's (at least four scrapes). The data source is a variable, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from grafana_foundation_sdk.builders import common as common_build
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, statetimeline, statushistory, table, timeseries
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from grafana_foundation_sdk.cog.builder import Builder

    Panel = Builder[model.Panel]

NODES = 'job=~"$job", instance=~"$instance"'
RANKS = 'run="$run", rank=~"$rank"'
MODULES = f'{RANKS}, module=~"$module"'
SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
GREEN, ORANGE, RED, BLUE = "green", "orange", "red", "blue"
TOO_MUCH = 0.02
"""Share of step time in hookd that is shown in red: twice its usual budget."""
RANK = "rank {{rank}}"
RUN_RANK = "{{run}} rank {{rank}}"
MODULE = "{{module}} rank {{rank}}"


class Query(NamedTuple):
    """One line of a panel, or many: PromQL, and the name of each."""

    expr: str
    legend: str


class Column(NamedTuple):
    """One column of numbers of a table: its heading, its unit, PromQL, and the value from which on it is red."""

    title: str
    unit: str
    expr: str
    red: float | None = None


def rate(counter: str, matchers: str) -> str:
    """Return the growth of a counter per second, for one set of matchers."""
    return f"rate({counter}{{{matchers}}}[$__rate_interval])"


def step_time(matchers: str, by: str) -> str:
    """Return the mean wall time of a step, in seconds, for each value of the label `by`."""
    seconds, count = rate("hookd_step_seconds_sum", matchers), rate("hookd_step_seconds_count", matchers)
    return f"sum by ({by}) ({seconds}) / (sum by ({by}) ({count}) > 0)"


def a_step(counter: str, matchers: str, by: str) -> str:
    """Return the growth of a counter in one step of the chosen ranks: of each, if `by` has `rank`, otherwise their mean."""
    steps, grown = rate("hookd_steps_total", RANKS), f"sum by ({by}) ({rate(counter, matchers)})"
    if "rank" in by:
        return f"{grown} / on (rank) group_left () (sum by (rank) ({steps}) > 0)"
    return f"{grown} / on () group_left () (sum({steps}) > 0)"


def lines(
    title: str, text: str, unit: str, *queries: Query, stacked: bool = False, width: int = 12, red: float | None = None
) -> Panel:
    """Return curves over time. `red` draws a line at that value: values above it are bad."""
    panel = timeseries.Panel().legend(_legend()).tooltip(_tooltip()).line_width(1).fill_opacity(30 if stacked else 0)
    panel = panel.span_nulls(False).show_points(common.VisibilityMode.AUTO).span(width).height(8)
    if stacked:
        panel = panel.stacking(common_build.StackingConfig().mode(common.StackingMode.NORMAL))
    if red is not None:
        panel = panel.thresholds(thresholds(red))
        panel = panel.thresholds_style(
            common_build.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        )
    return _filled(panel, title, text, unit, _ranged(queries))


def number(
    title: str, text: str, unit: str, expr: str, *, red: float | None = None, width: int = 3, none: str = "0"
) -> Panel:
    """Return one number, the latest. `none` is shown if there is no series."""
    panel = stat.Panel().span(width).height(4).no_value(none).color_mode(common.BigValueColorMode.VALUE)
    panel = panel.graph_mode(common.BigValueGraphMode.AREA if red is None else common.BigValueGraphMode.NONE)
    panel = panel.reduce_options(common_build.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    panel = panel.thresholds(thresholds(red))
    return _filled(panel, title, text, unit, _ranged([Query(expr, title)]))


def states(title: str, text: str, *queries: Query, words: dict[str, tuple[str, str]], width: int = 12) -> Panel:
    """Return bars over time, coloured by the meaning of a value. `words` maps each value to its word and its colour."""
    mapped = {value: model.ValueMappingResult(text=word, color=colour) for value, (word, colour) in words.items()}
    panel = statetimeline.Panel().span(width).height(8).mappings([model.ValueMap(options=mapped)])
    panel = panel.legend(_legend().show_legend(False)).tooltip(_tooltip()).row_height(0.8).merge_values(True)
    panel = panel.show_value(common.VisibilityMode.NEVER).line_width(0).fill_opacity(80)
    return _filled(panel, title, text, "none", _ranged(queries))


def cells(title: str, text: str, query: Query, *, least: float, most: float) -> Panel:
    """Return a row of cells over time for each series, green at `least` and red from `most` on; 32 rows are a page."""
    panel = statushistory.Panel().span(24).height(16).row_height(0.9).col_width(0.95).per_page(32)
    panel = panel.max_data_points(100)  # more columns are too narrow to be seen on half a screen
    panel = panel.show_value(common.VisibilityMode.NEVER).line_width(0).fill_opacity(90).min(least).max(most)
    panel = panel.color_scheme(build.FieldColor().mode(model.FieldColorModeId.CONTINUOUS_GR_YL_RD))
    panel = panel.legend(_legend().show_legend(False)).tooltip(_tooltip().mode(common.TooltipDisplayMode.SINGLE))
    return _filled(panel, title, text, "none", _ranged([query]))


def density(title: str, text: str, query: Query) -> Panel:
    """Return how many there are of each value over time. The legend of a series is its value, which Grafana sorts by."""
    colours = heatmap.HeatmapColorOptions().mode(heatmap_model.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    # Exponential: one slow rank of 1,024 is to be seen beside the many that are in time.
    colours = colours.scale(heatmap_model.HeatmapColorScale.EXPONENTIAL).exponent(0.5).fill("dark-orange")
    panel = heatmap.Panel().span(24).height(8).calculate(False).color(colours).max_data_points(100)
    panel = panel.rows_frame(heatmap.RowsHeatmapOptions().value("ranks").layout(common.HeatmapCellLayout.UNKNOWN))
    return _filled(panel, title, text, "none", _ranged([query]))


def rows(
    title: str,
    text: str,
    columns: Sequence[Column],
    *,
    links: Iterable[tuple[str, str, str]] = (),
    sort: str = "",
    width: int = 24,
) -> Panel:
    """Return a table of numbers, joined by the labels that the queries share.

    Args:
        title: the panel's title.
        text: its description.
        columns: those of numbers; the columns of labels are added by themselves.
        links: for each label that is a link: the label's name, the title of the link, and the address.
        sort: the heading of the column by which it is sorted, the largest value first.
        width: out of 24.
    """
    panel = table.Panel().span(width).height(9).cell_height(common.TableCellHeight.SM)
    if sort:
        panel = panel.sort_by([common_build.TableSortByFieldState().display_name(sort).desc(True)])
    named = {f"Value #{letter}" if len(columns) > 1 else "Value": one.title for letter, one in _lettered(columns)}
    panel = panel.with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
    organize = {"excludeByName": {"Time": True}, "renameByName": named}
    panel = panel.with_transformation(model.DataTransformerConfig(id_val="organize", options=organize))
    for column in columns:
        panel = panel.override_by_name(column.title, _look(column))
    for label, head, address in links:
        link = {"title": head, "url": address, "targetBlank": False}
        panel = panel.override_by_name(label, [model.DynamicConfigValue(id_val="links", value=[link])])
    return _filled(panel, title, text, "short", [_instant(one.expr, letter) for letter, one in _lettered(columns)])


def labels(title: str, text: str, expr: str, hidden: Sequence[str], *, width: int = 24) -> Panel:
    """Return a table of the labels of a query; its numbers mean nothing."""
    panel = table.Panel().span(width).height(7).cell_height(common.TableCellHeight.SM)
    excluded = dict.fromkeys(["Time", "Value", *hidden], True)
    panel = panel.with_transformation(
        model.DataTransformerConfig(id_val="organize", options={"excludeByName": excluded})
    )
    return _filled(panel, title, text, "string", [_instant(expr, "A")])


def grid(title: str, text: str, unit: str, expr: str, *, row: str, column: str, width: int = 12) -> Panel:
    """Return a table of one query with two labels, one in rows, the other in columns, coloured by value."""
    panel = table.Panel().span(width).height(8).cell_height(common.TableCellHeight.SM)
    options = {"rowField": row, "columnField": column, "valueField": "Value"}
    panel = panel.with_transformation(model.DataTransformerConfig(id_val="groupingToMatrix", options=options))
    panel = panel.color_scheme(build.FieldColor().mode(model.FieldColorModeId.CONTINUOUS_GR_YL_RD))
    cell = [model.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-background", "mode": "basic"})]
    panel = panel.override_by_field_type("number", cell)
    return _filled(panel, title, text, unit, [_instant(expr, "A")])


def thresholds(red: float | None) -> build.ThresholdsConfig:
    """Return colours by value: without `red`, always green."""
    steps = [model.Threshold(value=None, color=GREEN)]
    if red is not None:
        steps.append(model.Threshold(value=red, color=RED))
    return build.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def _filled(panel: Panel, title: str, text: str, unit: str, targets: Iterable[Builder]) -> Panel:
    panel = panel.title(title).description(text).unit(unit).datasource(SOURCE)
    for target in targets:
        panel = panel.with_target(target)
    return panel


def _ranged(queries: Sequence[Query]) -> list[Builder]:
    made = [
        (letter, prometheus.Dataquery().expr(one.expr).legend_format(one.legend)) for letter, one in _lettered(queries)
    ]
    return [one.range().datasource(SOURCE).ref_id(letter) for letter, one in made]


def _instant(expr: str, letter: str) -> Builder:
    query = prometheus.Dataquery().expr(expr).instant().format(PromQueryFormat.TABLE)
    return query.datasource(SOURCE).ref_id(letter)


def _lettered(items: Sequence) -> list[tuple[str, object]]:
    return [(chr(ord("A") + number), item) for number, item in enumerate(items)]


def _look(column: Column) -> list[model.DynamicConfigValue]:
    look = [model.DynamicConfigValue(id_val="unit", value=column.unit)]
    if column.red is not None:
        steps = [{"value": None, "color": "text"}, {"value": column.red, "color": RED}]
        look.append(model.DynamicConfigValue(id_val="thresholds", value={"mode": "absolute", "steps": steps}))
        look.append(model.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}))
    return look


def _legend() -> common_build.VizLegendOptions:
    legend = common_build.VizLegendOptions().display_mode(common.LegendDisplayMode.TABLE).show_legend(True)
    return legend.placement(common.LegendPlacement.BOTTOM).calcs(["lastNotNull", "max"])


def _tooltip() -> common_build.VizTooltipOptions:
    return common_build.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
