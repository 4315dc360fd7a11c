"""Labels that people gave to trajectories, for lists.

This module knows a store only as a function that runs SQL. The texts that it returns are not
escaped for a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from localtrace.read.trajectories import RunSql, listed_ids, listed_steps

_LABELLED_SQL = """
select distinct trace_id from stored.outcomes where is_label(name) and {chosen}
"""
"""Rollouts with a label; this skips the files of other steps, which the view `labels` cannot."""
_LABELS_SQL = """
select
    trace_id,
    coalesce(list(distinct tag order by tag) filter (tag is not null), []) as tags,
    coalesce(
        list(rating order by finite(rating) desc nulls last) filter (rating is not null), []
    ) as ratings,
    coalesce(list(comment order by time_ns) filter (comment is not null), []) as comments
from labels where {chosen} group by trace_id
"""

_LISTED_MAX = 500
"""Trajectories that a condition names; for more, all labels are read: people wrote them by hand."""


@dataclass(frozen=True, slots=True)
class Labels:
    """All that people said of one trajectory."""

    tags: list[str]
    ratings: list[float]
    comments: list[str]

    def __str__(self) -> str:
        """Return tags, ratings and comments on one line."""
        ratings = [f"rating {rating:g}" for rating in self.ratings]
        comments = [f'"{" ".join(comment.split())}"' for comment in self.comments]
        return ", ".join([*self.tags, *ratings, *comments])


def labels_of(run_sql: RunSql, steps: Mapping[str, int | None]) -> dict[str, Labels]:
    """Return the labels of those trajectories that have some, by trace id.

    Args:
        run_sql: runs SQL in the store.
        steps: the step of each trajectory, by trace id.
    """
    chosen = "true"
    params: dict[str, str] = {}
    if len(steps) <= _LISTED_MAX:
        in_ids, params = listed_ids(steps)
        sql = _LABELLED_SQL.format(chosen=f"{in_ids} and {listed_steps(steps.values())}")
        labelled = run_sql(sql, params)["trace_id"].to_pylist()
        if not labelled:
            return {}
        chosen, params = listed_ids(labelled)
    rows = run_sql(_LABELS_SQL.format(chosen=chosen), params).to_pylist()
    return {row.pop("trace_id"): Labels(**row) for row in rows if row["trace_id"] in steps}
