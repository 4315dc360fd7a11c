"""`localtrace ls`: trajectories by filters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from localtrace.cli.options import FILTERS_HELP, filters_argument, format_option, store_option
from localtrace.errors import QueryError

if TYPE_CHECKING:
    from localtrace.filters import Filters

_COLUMNS = (
    "trace_id", "run_id", "step", "sample_index", "rollout_n", "validate", "status", "reward",
    "advantage", "fate", "turn_count", "output_tokens", "started_at",
)  # fmt: skip

_LATE_COLUMNS = frozenset({"reward", "advantage", "fate"})
"""Columns that the table `trajectories` lacks, or holds as they were at the rollout's end."""


@click.command(epilog=FILTERS_HELP)
@filters_argument
@click.option("--limit", type=click.IntRange(0), default=20, show_default=True, help="0: all.")
@click.option("--sort", default="-started_at", show_default=True, help="Column; -column: down.")
@store_option
@format_option
def command(
    filters: Filters, limit: int, sort: str, store_paths: tuple[Path, ...], form: str
) -> None:
    """List trajectories, the newest first."""
    from localtrace.cli.matching import say_nothing_matches
    from localtrace.cli.output import print_table
    from localtrace.reader import open_store
    from localtrace.trajectories import listed_ids, listed_steps

    column = sort.removeprefix("-")
    if column not in _COLUMNS:
        raise QueryError(f"cannot sort by {column!r}: sort by one of {', '.join(_COLUMNS)}")
    direction = "desc" if sort.startswith("-") else "asc"
    order = f"order by {column} {direction} nulls last, trace_id limit {limit or 'all'}"
    condition, params = filters.where_clause()
    chosen = f"from trajectories where {condition}"
    if filters.knows_table and column not in _LATE_COLUMNS:
        # The view looks up the outcomes of every trajectory before it sorts.
        chosen = f"from stored.flagged where not superseded and {condition}"
    with open_store(*store_paths) as store:
        if limit:
            listed = store.sql(f"select trace_id, step {chosen} {order}", params).to_arrow()
            in_ids, bound = listed_ids(listed["trace_id"].to_pylist())
            chosen_rows = f"{in_ids} and {listed_steps(listed['step'].to_pylist())}"
        else:
            chosen_rows, bound = condition, params
        rows = store.sql(
            f"select {', '.join(_COLUMNS)} from trajectories where {chosen_rows} {order}", bound
        ).to_arrow()
        print_table(rows, form)
        if not len(rows):
            say_nothing_matches(store, filters)
        elif len(rows) == limit:
            (total,) = store.sql(f"select count(*) as n {chosen}", params).to_dicts()
            if total["n"] > limit:
                said = f"{limit} of {total['n']} trajectories; see more with --limit"
                click.echo(said, err=True)
