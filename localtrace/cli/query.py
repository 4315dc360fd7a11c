"""`localtrace query`: run or list named queries."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localtrace.cli.completing import complete_parameter, complete_query
from localtrace.cli.open_with_progress import open_with_bar, timeout_option
from localtrace.cli.options import format_option, parse_params, store_option
from localtrace.printing import draw, say

if TYPE_CHECKING:
    import pyarrow as pa

    from localtrace.read.named_queries import Plot
    from localtrace.read.store import Store

_TERMINAL = "terminal"


@click.command()
@click.argument("name", required=False, shell_complete=complete_query)
@click.argument("values", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_parameter)
@click.option(
    "--queries",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Another folder of .sql files; may be repeated.",
)
@click.option(
    "--plot",
    is_flag=False,
    flag_value=_TERMINAL,
    metavar="[FILE]",
    help="Draw the rows on the terminal, or into a .png or .svg FILE.",
)
@store_option
@format_option
@timeout_option
def command(
    name: str | None,
    values: tuple[str, ...],
    folders: tuple[Path, ...],
    plot: str | None,
    store_paths: tuple[Path, ...],
    form: str,
    timeout_s: float,
) -> None:
    """Run a named query, or list all queries when no NAME is given.

    Every query also takes the filters run, project, experiment, attempt, step and validate, such as
    step=3..10 or 'step<5'. Validation rollouts are left out unless validate=true, and superseded
    attempts and greedy baselines always.
    """
    from localtrace.cli.output import is_for_terminal, print_listing, print_table
    from localtrace.read.counted import FILTERS
    from localtrace.read.named_queries import find_query
    from localtrace.read.run_names import run_names

    if plot is not None:
        if form != "table":
            raise click.UsageError("--plot and --format exclude each other: choose one")
        plot, name, values = _split_plot(plot, name, values)
    if name is None:
        print_listing(_listing(folders), form)
        if is_for_terminal(form):
            say(err=True)
            say(
                "Parameters in [brackets] may be left out. Every query also takes the filters "
                f"{', '.join(FILTERS)}.",
                err=True,
            )
        return
    query = find_query(name, folders)
    params = parse_params(values)
    with open_with_bar(store_paths, timeout_s) as store:
        rows = store.query(name, folders=folders, **params).to_arrow()
        if not len(rows):
            say(f"no rows: {_why_none(store, params)}", err=True)
        elif gone := store.pruned(query, **params):
            say(f"note: {gone}; this is about the others", err=True)
        told_apart = run_names(store) if plot else {}
    if plot is None:
        print_table(rows, form)
    elif len(rows):
        _plot(rows, plot, query.plot, told_apart)


def _split_plot(
    plot: str, name: str | None, values: tuple[str, ...]
) -> tuple[str, str | None, tuple[str, ...]]:
    """Return the target of a plot, the query's name and its parameters.

    The word after --plot is a file only if it ends like a picture; otherwise it belongs to the
    query.
    """
    from localtrace.cli.plot import PICTURES
    from localtrace.read.filters import is_filter

    if plot == _TERMINAL or plot.endswith(PICTURES):
        return plot, name, values
    if not is_filter(plot) and name is not None and not is_filter(name):
        raise click.UsageError(f"--plot {plot}: name a file that ends with .png or .svg")
    words = sorted([plot, *([] if name is None else [name]), *values], key=is_filter)
    return _TERMINAL, words[0], tuple(words[1:])


def _why_none(store: Store, params: dict[str, Any]) -> str:
    from localtrace.cli.no_match import why_nothing
    from localtrace.read.counted import FILTERS
    from localtrace.read.filters import Filters

    return why_nothing(store, Filters(**{key: params.get(key) for key in FILTERS}))


def _plot(rows: pa.Table, plot: str, drawing: Plot | None, run_names: dict[str, str]) -> None:
    from localtrace.cli.plot import charts, drawn, save

    shown = charts(rows, drawing, run_names)
    if plot != _TERMINAL:
        save(shown, Path(plot))
        say(f"wrote {plot}", err=True)
        return
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for chart in shown:
        draw(drawn(chart, shutil.get_terminal_size().columns, coloured))
        if chart.left_out:
            say(f"{chart.left_out} more lines are not shown: narrow the query down", err=True)


def _listing(folders: tuple[Path, ...]) -> pa.Table:
    import pyarrow as pa

    from localtrace.read.named_queries import load_queries

    rows = [
        {
            "name": query.name,
            "parameters": query.usage,
            "description": query.description,
        }
        for query in load_queries(folders).values()
    ]
    return pa.Table.from_pylist(rows)
