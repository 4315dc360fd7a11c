"""Which trajectories to upload: filters, SQL or ids in; ordered ids and their runs out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from localtrace.errors import QueryError
from localtrace.filters import Filters
from localtrace.types import Run

if TYPE_CHECKING:
    from localtrace.reader import Store

Selection: TypeAlias = Filters | str | Iterable[str]
"""Filters, an SQL query with a column `trace_id`, or trace ids."""

_CHOSEN = """
select trace_id, run_id, attempt, project, experiment, start_ns from {view} where {condition}
order by project, experiment, run_id, attempt, step, sample_index, rollout_n, trace_id
"""


@dataclass(frozen=True, slots=True)
class ChosenRun:
    """The trajectories to upload of one run."""

    run: Run
    trace_ids: list[str]
    """In the order of their steps."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a selection stands for in a store."""

    text: str
    """The selection in words, for the receipt."""
    runs: list[ChosenRun]
    unknown: list[str]
    """Ids that were asked for and that the store does not hold."""

    @property
    def trace_ids(self) -> list[str]:
        """All ids, in the order in which they are uploaded."""
        return [trace_id for part in self.runs for trace_id in part.trace_ids]


def choose(store: Store, selection: Selection, limit: int | None = None) -> Choice:
    """Resolve a selection.

    Args:
        limit: at most this many trajectories; by default all.

    Raises:
        QueryError: the filters or the SQL cannot be run, or the SQL has no column `trace_id`.
    """
    if isinstance(selection, Filters):
        condition, params = selection.where_clause()
        query = _CHOSEN.format(view="trajectories", condition=condition)
        cut = "" if limit is None else f"limit {int(limit)}"
        text = " ".join(f"{term.key}{term.operator}{term.value}" for term in selection.terms)
        return Choice(text or "everything", _chosen(store, query + cut, params), [])
    ids = _ids_of(store, selection) if isinstance(selection, str) else list(selection)
    ids = list(dict.fromkeys(ids))[:limit]
    text = selection if isinstance(selection, str) else f"{len(ids)} trace ids"
    # By id, trajectories of superseded attempts can be had too.
    query = _CHOSEN.format(
        view="all_trajectories", condition="trace_id in (select unnest($trace_ids))"
    )
    choice = Choice(text, _chosen(store, query, {"trace_ids": ids}), [])
    known = set(choice.trace_ids)
    return replace(choice, unknown=[trace_id for trace_id in ids if trace_id not in known])


def _ids_of(store: Store, query: str) -> list[str]:
    table = store.sql(query).to_arrow()
    if "trace_id" not in table.column_names:
        raise QueryError(
            f"the query has no column trace_id, only {', '.join(table.column_names)}: "
            "select trace_id in it"
        )
    return [str(trace_id) for trace_id in table["trace_id"].to_pylist() if trace_id is not None]


def _chosen(store: Store, query: str, params: dict[str, Any]) -> list[ChosenRun]:
    times = {
        (row["run_id"], row["attempt"]): (row["start_ns"], row["end_ns"])
        for row in store.sql("select run_id, attempt, start_ns, end_ns from runs").to_dicts()
    }
    parts: dict[tuple[Any, ...], ChosenRun] = {}
    for row in store.sql(query, params).to_dicts():
        key = (row["run_id"], row["attempt"], row["project"], row["experiment"])
        if key not in parts:
            start_ns, end_ns = times.get(key[:2], (row["start_ns"], None))
            run = Run(*key, start_ns, end_ns, host=None, command=None, config=None)
            parts[key] = ChosenRun(run, [])
        parts[key].trace_ids.append(row["trace_id"])
    return list(parts.values())
