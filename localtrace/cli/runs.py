"""`localtrace runs`: one line per attempt of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from localtrace.cli.options import FILTERS_HELP, filters_argument, format_option, store_option

if TYPE_CHECKING:
    import pyarrow as pa

    from localtrace.read.filters import Filters

_ON_TERMINAL = (
    "run_id", "attempt", "run_name", "steps", "trajectories", "mean_reward", "not_finite",
    "started_at",
)  # fmt: skip
_SQL = """
select
    r.run_id, attempt, project, experiment, started_at, ended_at,
    first_step, last_step, coalesce(trajectories, 0) as trajectories, mean_reward,
    coalesce(not_finite, 0) as not_finite
from (select * from runs where {condition}) as r
left join (
    select
        run_id, attempt, min(step) as first_step, max(step) as last_step,
        count(*) as trajectories, finite(avg(finite(reward))) as mean_reward,
        count(*) filter (not isfinite(reward)) as not_finite
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
    """List the runs, one line per attempt.

    The column run_name tells runs apart: their projects, experiments, or values of their configs.
    not_finite counts rewards that are NaN or infinite, which mean_reward leaves out.
    """
    from localtrace.cli.no_match import say_nothing_matches
    from localtrace.cli.output import is_for_terminal, print_table
    from localtrace.read.run_names import run_names
    from localtrace.read.store import open_store

    condition, params = filters.where_clause("runs")
    with open_store(*store_paths) as store:
        rows = store.own_sql(_SQL.format(condition=condition), params, filters).to_arrow()
        told_apart = run_names(store)
        texts = {"run_name": [told_apart.get(run_id) for run_id in rows["run_id"].to_pylist()]}
        names = [*rows.column_names, "run_name"]
        if is_for_terminal(form):
            texts["steps"] = _steps(rows)
            names = _informative(rows, texts)
        print_table(rows, form, texts, names)
        if not len(rows):
            say_nothing_matches(store, filters)


def _steps(rows: pa.Table) -> list[str | None]:
    ends = zip(rows["first_step"].to_pylist(), rows["last_step"].to_pylist(), strict=True)
    return [None if low is None else f"{low}..{high}" for low, high in ends]


def _informative(rows: pa.Table, texts: dict[str, list[str | None]]) -> list[str]:
    """Return the columns for a terminal, without those that say nothing here."""
    nothing = {
        "attempt": set(rows["attempt"].to_pylist()) <= {0},
        "run_name": set(texts["run_name"]) <= {None},
        "not_finite": set(rows["not_finite"].to_pylist()) <= {0},
    }
    return [name for name in _ON_TERMINAL if not nothing.get(name)]
