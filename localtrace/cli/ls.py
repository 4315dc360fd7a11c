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


@click.command(epilog=FILTERS_HELP)
@filters_argument
@click.option("--limit", type=click.IntRange(0), default=20, show_default=True, help="0: all.")
@click.option("--sort", default="-started_at", show_default=True, help="Column; -column: down.")
@store_option
@format_option
def command(filters: Filters, limit: int, sort: str, store_path: Path, form: str) -> None:
    """List trajectories, the newest first."""
    from localtrace.cli.output import print_table
    from localtrace.reader import open_store

    column = sort.removeprefix("-")
    if column not in _COLUMNS:
        raise QueryError(f"cannot sort by {column!r}: sort by one of {', '.join(_COLUMNS)}")
    direction = "desc" if sort.startswith("-") else "asc"
    condition, params = filters.where_clause()
    with open_store(store_path) as store:
        rows = store.sql(
            f"select {', '.join(_COLUMNS)} from trajectories where {condition} "
            f"order by {column} {direction} nulls last, trace_id limit {limit or 'all'}",
            params,
        ).to_arrow()
        print_table(rows, form)
        total = store.sql(f"select count(*) as n from trajectories where {condition}", params)
    count = total.to_dicts()[0]["n"]
    if count > len(rows):
        click.echo(f"{len(rows)} of {count} trajectories; see more with --limit", err=True)
