"""`localtrace runs`: one line per attempt of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from localtrace.cli.options import FILTERS_HELP, filters_argument, format_option, store_option

if TYPE_CHECKING:
    from localtrace.filters import Filters

_SQL = """
select
    r.run_id, attempt, project, experiment, started_at, ended_at,
    first_step, last_step, coalesce(trajectories, 0) as trajectories, mean_reward
from (select * from runs where {condition}) as r
left join (
    select
        run_id, attempt, min(step) as first_step, max(step) as last_step,
        count(*) as trajectories, avg(reward) as mean_reward
    from all_trajectories
    group by run_id, attempt
) as t using (run_id, attempt)
order by started_at, r.run_id, attempt
"""


@click.command(epilog=FILTERS_HELP)
@filters_argument
@store_option
@format_option
def command(store_paths: tuple[Path, ...], filters: Filters, form: str) -> None:
    """List the runs, one line per attempt."""
    from localtrace.cli.matching import say_nothing_matches
    from localtrace.cli.output import print_table
    from localtrace.reader import open_store

    condition, params = filters.where_clause("runs")
    with open_store(*store_paths) as store:
        rows = store.sql(_SQL.format(condition=condition), params).to_arrow()
        print_table(rows, form)
        if not len(rows):
            say_nothing_matches(store, filters)
