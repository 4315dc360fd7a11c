"""Labels that people gave to trajectories, for lists.

This module knows a store only as a function that runs SQL. The texts that it returns are not
escaped for a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
        said = [*self.tags, *(f"rating {one:g}" for one in self.ratings)]
        return ", ".join([*said, *(f'"{" ".join(one.split())}"' for one in self.comments)])


def labels_of(run_sql: RunSql, steps: Mapping[str, int | None]) -> dict[str, Labels]:
    """Return the labels of those trajectories that have some, by trace id.

    Args:
        run_sql: runs SQL in the store.
        steps: the step of each trajectory, by trace id.
    """
    if len(steps) > _LISTED_MAX:
        rows = run_sql(_LABELS_SQL.format(chosen="true"), {}).to_pylist()
        return {one: said for one, said in _by_trace(rows) if one in steps}
    in_ids, params = listed_ids(steps)
    chosen = f"{in_ids} and {listed_steps(steps.values())}"
    labelled = run_sql(_LABELLED_SQL.format(chosen=chosen), params)["trace_id"].to_pylist()
    if not labelled:
        return {}
    in_ids, params = listed_ids(labelled)
    rows = run_sql(_LABELS_SQL.format(chosen=in_ids), params).to_pylist()
    return dict(_by_trace(rows))


def _by_trace(rows: list[dict[str, Any]]) -> Iterator[tuple[str, Labels]]:
    for row in rows:
        yield row.pop("trace_id"), Labels(**row)
