"""Data that cannot be seen: it was never recorded, is not recorded yet, or was pruned.

This module knows a store only as a function that runs SQL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from localtrace.errors import NothingRecorded
from localtrace.read.counted import over_counted

if TYPE_CHECKING:
    import pyarrow as pa

    from localtrace.read.filters import Filters
    from localtrace.read.named_queries import NamedQuery
    from localtrace.types import Trajectory

PRUNED = "its calls were pruned"
"""The beginning of every text that says why a trajectory has no calls any more."""
_WITHOUT_END = {
    "running": "calls that have not returned are not recorded yet",
    "interrupted": "calls that had not returned are lost: its process is gone, or this is a copy "
    "of the store from before the end",
}
"""What the record of a trajectory without an end lacks, by its status."""
RunSql = Callable[[str, Mapping[str, Any]], "pa.Table"]

_READS_CALLS = re.compile(
    r"\b(?:from|join)\s+(?:stored\.)?"
    r"(?:spans|calls|turns|messages|tokens|answers|detectors|engine_calls)\b",
    re.IGNORECASE,
)
_COUNT_SQL = "select count(spans_pruned) as pruned, count(*) as n from trajectories"


def why_no_calls(trajectory: Trajectory) -> str | None:
    """Return when and by what rule its calls were deleted; None if they were not."""
    if trajectory.spans_pruned is not None:
        return f"{PRUNED}: {trajectory.spans_pruned}"
    return None


def why_unfinished(trajectory: Trajectory) -> str | None:
    """Return when its newest call returned, and what its record lacks; None if it ended."""
    if trajectory.status not in _WITHOUT_END:
        return None
    newest_ns = max((span.end_ns for span in trajectory.spans), default=None)
    newest = "no call has returned"
    if newest_ns is not None:
        newest = f"newest call {datetime.fromtimestamp(newest_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"{newest}; {_WITHOUT_END[trajectory.status]}"


def pruned_for(run_sql: RunSql, query: NamedQuery, filters: Filters) -> str:
    """Return how many of the trajectories that a query looks into were pruned; empty if none.

    Args:
        run_sql: runs SQL in the store.
        query: the query; none are counted where it reads no calls.
        filters: its filters.
    """
    if not _READS_CALLS.search(query.sql):
        return ""
    (row,) = run_sql(*over_counted(_COUNT_SQL, filters)).to_pylist()
    if not row["pruned"]:
        return ""
    return f"the calls of {row['pruned']} of {row['n']} trajectories were pruned"


def refuse_nothing(
    run_sql: RunSql, query: NamedQuery, own: Mapping[str, Any], filters: Filters
) -> None:
    """Raise where a query that found no rows lacks the data it needs.

    Raises:
        NothingRecorded: the data was not recorded, or was pruned.
    """
    if not len(run_sql("from stored.trajectories limit 1", {})):
        return
    gone = pruned_for(run_sql, query, filters)
    for need in query.needs:
        values = need.bind(query.own_values(own))
        if not len(run_sql(f"select 1 from ({need.sql}) limit 1", values)):
            why = f"; {gone}" * bool(gone)
            raise NothingRecorded(f"query {query.name} needs {need.text}{why}")
    if gone:
        raise NothingRecorded(f"query {query.name} finds nothing: {gone}")
