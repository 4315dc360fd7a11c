"""Data that cannot be seen: it was never recorded, or it was pruned.

This module knows a store only as a function that runs SQL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localtrace.errors import NothingRecorded
from localtrace.read.counted import over_counted

if TYPE_CHECKING:
    import pyarrow as pa

    from localtrace.read.named_queries import NamedQuery
    from localtrace.types import Trajectory

PRUNED = "its calls were pruned"
"""The beginning of every text that says why a trajectory has no calls any more."""
RunSql = Callable[[str, Mapping[str, Any]], "pa.Table"]

_READS_CALLS = re.compile(
    r"\b(?:from|join)\s+(?:stored\.)?"
    r"(?:spans|calls|turns|messages|tokens|answers|detectors|engine_calls)\b",
    re.IGNORECASE,
)
_COUNT_SQL = "select count(spans_pruned) as pruned, count(*) as n from trajectories"


@dataclass(frozen=True, slots=True)
class Pruned:
    """A count of the trajectories that a query looks at and that have lost their calls."""

    trajectories: int
    total: int

    def __bool__(self) -> bool:
        return self.trajectories > 0

    def __str__(self) -> str:
        return f"the calls of {self.trajectories} of {self.total} trajectories were pruned"


def why_no_calls(trajectory: Trajectory) -> str | None:
    """Return when and by what rule its calls were deleted; None if they were not."""
    if trajectory.spans_pruned is not None:
        return f"{PRUNED}: {trajectory.spans_pruned}"
    return None


def pruned_for(run_sql: RunSql, query: NamedQuery, params: Mapping[str, Any]) -> Pruned:
    """Count the pruned trajectories that a query would have looked into.

    Args:
        run_sql: runs SQL in the store.
        query: the query; none are counted where it reads no calls.
        params: its parameters and filters.
    """
    if not _READS_CALLS.search(query.sql):
        return Pruned(0, 0)
    (row,) = run_sql(*over_counted(_COUNT_SQL, params)).to_pylist()
    return Pruned(row["pruned"], row["n"])


def refuse_nothing(run_sql: RunSql, query: NamedQuery, params: Mapping[str, Any]) -> None:
    """Raise where a query that found no rows lacks the data it needs; the arguments are the same.

    Raises:
        NothingRecorded: the data was not recorded, or was pruned.
    """
    if not len(run_sql("from stored.trajectories limit 1", {})):
        return
    gone = pruned_for(run_sql, query, params)
    for need in query.needs:
        if not len(
            run_sql(f"select 1 from ({need.sql}) limit 1", need.bind(query.own_values(params)))
        ):
            why = f"; {gone}" if gone else ""
            raise NothingRecorded(f"query {query.name} needs {need.text}{why}")
    if gone:
        raise NothingRecorded(f"query {query.name} finds nothing: {gone}")
