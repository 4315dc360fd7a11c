"""The rows of a query as lines on the terminal, as its comment `-- plot:` declares."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

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
    lines = {
        escape_line(name): [(int(x), y) for x, y in points if math.isfinite(y)]
        for name, points in plot.lines(table, run_names).items()
    }
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        raise QueryError(f"nothing to plot: no row has a {plot.x} and a number to draw")
    shown = dict(list(lines.items())[:_LINES_MAX])
    is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = shutil.get_terminal_size().columns
    draw(_drawn(shown, plot.x, escape_line(", ".join(plot.y)), width, is_coloured))
    if len(lines) > len(shown):
        more = len(lines) - len(shown)
        say(f"{more} more lines are not shown: narrow the query down", err=True)


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
