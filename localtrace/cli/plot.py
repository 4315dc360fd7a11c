"""The rows of a query as lines on the terminal, as its comment `-- plot:` declares."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from localtrace.errors import MissingDependency, QueryError
from localtrace.printing import draw, say
from localtrace.terminal import escape_line

if TYPE_CHECKING:
    import pyarrow as pa

    from localtrace.read.named_queries import Plot

_LINES_MAX = 10
_HEIGHT = 12
_BESIDE = 19
"""Characters that the axes and their names take, without the name of x."""
_TICK = 10
"""Characters between two ticks of plotille's x axis."""
_MARKS = "abcdefghij"
_COLOURS = ("cyan", "red", "green", "yellow", "magenta", "blue", "white", "bright_cyan",
            "bright_red", "bright_green")  # fmt: skip
_Points = list[tuple[int, float]]


def print_plot(table: pa.Table, plot: Plot, run_names: Mapping[str, str]) -> None:
    """Draw the lines of a query; of too many the first ones, and the others are counted.

    Args:
        table: the rows of the query.
        plot: the plot that the query declares.
        run_names: the name of each run, by run id.

    Raises:
        QueryError: the columns of the plot are missing, or several rows of a line share an x.
        MissingDependency: plotille is not installed.
    """
    lines = lines_of(table, plot, run_names)
    shown = dict(list(lines.items())[:_LINES_MAX])
    is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size().columns
    draw(_drawn(shown, plot.x, escape_line(", ".join(plot.y)), width, is_coloured))
    if len(lines) > len(shown):
        more = len(lines) - len(shown)
        say(f"{more} more lines are not shown: narrow the query down", err=True)


def lines_of(
    table: pa.Table, plot: Plot, run_names: Mapping[str, str]
) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each line, by its label; see `print_plot`."""
    missing = [name for name in (plot.x, *plot.y, *plot.by) if name not in table.column_names]
    if missing:
        raise QueryError(
            f"no plot: the query has no column {missing[0]}, which its comment -- plot: names"
        )
    table = table.filter(table[plot.x].is_valid())
    labels = _labels(table, plot.by, run_names)
    places = table[plot.x].to_pylist()
    if len(set(zip(labels, places, strict=True))) < len(places):
        raise QueryError(f"no plot: several rows of a {plot.x} cannot be told apart")
    lines: dict[str, _Points] = {}
    for name in plot.y:
        ending = [name] if len(plot.y) > 1 else []
        for label, place, value in zip(labels, places, table[name].to_pylist(), strict=True):
            if value is not None and math.isfinite(value):
                line = ", ".join(filter(None, (label, *ending)))
                lines.setdefault(line, []).append((int(place), float(value)))
    if not lines:
        raise QueryError(f"nothing to plot: no row has a {plot.x} and a number to draw")
    return {label: sorted(points) for label, points in lines.items()}


def _labels(table: pa.Table, keys: Sequence[str], run_names: Mapping[str, str]) -> list[str]:
    """Return the label of each row's line: the keys that differ between rows."""
    columns = {key: table[key].to_pylist() for key in keys}
    telling = {key: values for key, values in columns.items() if len(set(values)) > 1}
    if "run_id" in telling:
        telling["run_id"] = [run_names.get(run, run) for run in telling["run_id"]]
    rows = zip(*telling.values(), strict=True) if telling else [()] * len(table)
    return [", ".join(map(_label, telling, row)) for row in rows]


def _label(key: str, value: Any) -> str:
    return escape_line(value if isinstance(value, str) else f"{key} {value}")


def _drawn(lines: Mapping[str, _Points], x: str, y: str, width: int, is_coloured: bool) -> str:
    try:
        import plotille
    except ImportError:
        raise MissingDependency.for_extra("plotille", "plot") from None
    figure = plotille.Figure()
    figure.height = _HEIGHT
    figure.x_label, figure.y_label = x, y
    figure.color_mode, figure.with_colors = "names", is_coloured
    figure.origin = False
    figure.register_label_formatter(float, _tick)
    steps = [step for points in lines.values() for step, _ in points]
    span = max(steps) - min(steps)
    figure.width, shown = _whole_ticks(span, max(2, (width - _BESIDE - len(x)) // _TICK))
    figure.set_x_limits(min(steps), min(steps) + shown)
    figure.x_ticks_fkt = _whole
    for (label, points), mark, colour in zip(lines.items(), _MARKS, _COLOURS, strict=False):
        figure.plot(
            [step for step, _ in points],
            [value for _, value in points],
            lc=colour if is_coloured else None,
            label=label,
            marker=mark if len(lines) > 1 and not is_coloured else None,
        )
    return str(figure.show(legend=len(lines) > 1))


def _whole_ticks(span: int, ticks_max: int) -> tuple[int, int]:
    """Return the width of a chart with whole numbers at its ticks, and the range of x."""
    span = max(1, span)
    if span <= ticks_max:
        return _TICK * (ticks_max // span) * span, span
    each = math.ceil(span / ticks_max)
    ticks = math.ceil(span / each)
    return _TICK * ticks, ticks * each


def _whole(value: float, following: float) -> str:
    """Return the text at a tick of x; empty between two whole numbers."""
    return str(round(value)) if math.isclose(value, round(value), abs_tol=1e-6) else ""


def _tick(val: float, chars: int, delta: float, left: bool = False) -> str:
    text = f"{val:.4g}"
    return text.ljust(chars) if left else text.rjust(chars)
