"""Resolve a selection: from filters, a query or ids to ordered trace ids by run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from sys import intern
from typing import TYPE_CHECKING, Any, TypeAlias

from localtrace.errors import QueryError
from localtrace.read.filters import Filters
from localtrace.read.unseen import PRUNED
from localtrace.types import Run
from localtrace.values.codec import fields_from_json, from_json

if TYPE_CHECKING:
    import pyarrow as pa

    from localtrace.read.result import Result
    from localtrace.read.store import Store

_GROUP = "project, experiment, run_id, attempt, step, validate, group_key"
"""The key of a group, as in the view `groups`, but for superseded rollouts too."""
_CHOSEN = """
select trace_id, run_id, attempt, project, experiment, start_ns, spans_pruned
from {view} where {condition}
order by project, experiment, run_id, attempt, step, sample_index, rollout_n, trace_id
"""
_LISTED = "trace_id in (select unnest($trace_ids))"
_EXTREMES = f"""
select trace_id from (
    select
        trace_id,
        row_number() over (
            partition by {_GROUP} order by reward desc, trace_id) as from_best,
        row_number() over (
            partition by {_GROUP} order by reward, trace_id) as from_worst,
    from all_trajectories
    where isfinite(reward) and group_key is not null and {_LISTED}
)
where from_best <= $best or from_worst <= $worst
"""
_NONE = Filters()
_EVERY = Filters().relation(with_superseded=True)
_WHOLE_GROUPS = f"""
select trace_id from {_EVERY}
where not superseded and ({_LISTED} or row({_GROUP}) in (
    select row({_GROUP}) from {_EVERY} where {_LISTED} and group_key is not null
))
"""


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice of trajectories, in four steps.

    1. `filters`, `sql` and `trace_ids` choose. If several are given, all must hold.
    2. `best` and `worst` keep the extremes of each group.
    3. `groups` adds the rest of every group with a chosen member.
    4. `limit` keeps the first ones.
    """

    filters: Filters = field(default_factory=Filters)
    sql: str | None = None
    """A query with a column `trace_id`."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Values for `$name` in `sql`."""
    trace_ids: tuple[str, ...] | None = None
    """Ids, or unique beginnings of ids."""
    best: int = 0
    """Number to keep of each group, by highest reward."""
    worst: int = 0
    """Number to keep of each group, by lowest reward."""
    groups: bool = False
    """True to add all rollouts of every group with a chosen member."""
    limit: int | None = None
    """Largest number of trajectories."""

    @classmethod
    def of(cls, chosen: Chosen) -> Selection:
        """Convert filters, SQL or ids to a selection."""
        if isinstance(chosen, Selection):
            return chosen
        if isinstance(chosen, Filters):
            return cls(filters=chosen)
        return cls(sql=chosen) if isinstance(chosen, str) else cls(trace_ids=tuple(chosen))

    @property
    def text(self) -> str:
        """The selection in words, for receipts and bundles."""
        terms = [str(term) for term in self.filters.terms]
        sql = [] if self.sql is None else [" ".join(self.sql.split())]
        params = [f"{name}={value}" for name, value in self.params.items()]
        ids = [] if self.trace_ids is None else [f"{len(self.trace_ids)} trace ids"]
        keeps = [
            f"{name} {n} per group" for name in ("best", "worst") if (n := getattr(self, name))
        ]
        groups = ["whole groups"] if self.groups else []
        limit = [] if self.limit is None else [f"at most {self.limit}"]
        what = " ".join([*terms, *sql, *params, *ids]) or "everything"
        return ", ".join([what, *keeps, *groups, *limit])


Chosen: TypeAlias = Selection | Filters | str | Iterable[str]
"""A selection, or its simplest forms: filters, an SQL query, trace ids."""


@dataclass(frozen=True, slots=True)
class ChosenRun:
    """The chosen trajectories of one run."""

    run: Run
    trace_ids: list[str]
    """The ids, ordered by step."""
    pruned: dict[str, str] = field(default_factory=dict)
    """Time and rules of the pruning, by trace id, of those whose calls were pruned."""

    @property
    def whole_ids(self) -> list[str]:
        """The ids of those whose calls were not pruned."""
        return [trace_id for trace_id in self.trace_ids if trace_id not in self.pruned]


@dataclass(frozen=True, slots=True)
class Choice:
    """A selection, resolved in a store."""

    text: str
    """The selection in words."""
    runs: list[ChosenRun]
    unknown: list[str]
    """Requested ids that the store does not hold."""

    @property
    def trace_ids(self) -> list[str]:
        """All ids, in the order of upload."""
        return [trace_id for part in self.runs for trace_id in part.trace_ids]

    @property
    def pruned(self) -> dict[str, str]:
        """Time and rules of the pruning, by trace id, of those whose calls were pruned."""
        return {trace_id: mark for part in self.runs for trace_id, mark in part.pruned.items()}

    def refused(self) -> dict[str, str]:
        """Return why trajectories cannot be replayed, by trace id."""
        return {
            trace_id: f"{PRUNED} ({mark}), so nothing is sent, and the target keeps "
            "what it has: leave such ones out with 'where=spans_pruned is null'"
            for trace_id, mark in self.pruned.items()
        }


def choose(store: Store, chosen: Chosen) -> Choice:
    """Resolve a selection in a store.

    Raises:
        QueryError: the filters or the SQL cannot be run, or the SQL has no column `trace_id`.
    """
    selection = Selection.of(chosen)
    ids = _named(store, selection)
    condition, params = selection.filters.where_clause()
    view = selection.filters.relation(with_superseded=True)
    if ids is None:
        condition = f"({condition}) and not superseded"
    else:
        # Ids and SQL may name trajectories of superseded attempts; filters never find them.
        condition, params = f"({condition}) and {_LISTED}", {**params, "trace_ids": ids}
    if selection.best or selection.worst or selection.groups:
        query = _CHOSEN.format(view=view, condition=condition)
        met = _trace_ids(store.own_sql(query, params, selection.filters))
        view, condition = _EVERY, _LISTED
        params = {"trace_ids": _by_group(store, selection, met)}
    cut = "" if selection.limit is None else f"limit {int(selection.limit)}"
    query = _CHOSEN.format(view=view, condition=condition) + cut
    rows = store.own_sql(query, params, selection.filters)
    return Choice(selection.text, _chosen(store, rows.to_arrow()), _unknown(store, ids or []))


def _unknown(store: Store, ids: list[str]) -> list[str]:
    query = f"select trace_id from {_EVERY} where {_LISTED}"
    known = set(_trace_ids(store.own_sql(query, {"trace_ids": ids}))) if ids else set()
    return [trace_id for trace_id in ids if trace_id not in known]


def _named(store: Store, selection: Selection) -> list[str] | None:
    """Return the ids from SQL or a list, without duplicates; None if neither is given."""
    lists = []
    if selection.trace_ids is not None:
        whole = store.whole_ids(selection.trace_ids)
        lists.append([whole.get(given, given) for given in selection.trace_ids])
    if selection.sql is not None:
        lists.append(_trace_ids(store.sql(selection.sql, selection.params or None)))
    if not lists:
        return None
    both = set(lists[0]).intersection(*lists[1:])
    return [trace_id for trace_id in dict.fromkeys(lists[0]) if trace_id in both]


def _by_group(store: Store, selection: Selection, ids: list[str]) -> list[str]:
    if selection.best or selection.worst:
        ends = {"trace_ids": ids, "best": selection.best, "worst": selection.worst}
        ids = _trace_ids(store.own_sql(_EXTREMES, ends))
    if not selection.groups:
        return ids
    return _trace_ids(store.own_sql(_WHOLE_GROUPS, {"trace_ids": ids}))


def _trace_ids(rows: Result) -> list[str]:
    table = rows.to_arrow()
    if "trace_id" not in table.column_names:
        raise QueryError(
            f"the query has no column trace_id, only {', '.join(table.column_names)}: "
            "select trace_id in it"
        )
    return [str(trace_id) for trace_id in table["trace_id"].to_pylist() if trace_id is not None]


def _chosen(store: Store, rows: pa.Table) -> list[ChosenRun]:
    known = {(run.run_id, run.attempt): run for run in runs(store)}
    parts: dict[tuple[Any, ...], ChosenRun] = {}
    for row in _rows(rows):
        key = (row["run_id"], row["attempt"], row["project"], row["experiment"])
        if key not in parts:
            run = known.get(key[:2]) or Run(*key, row["start_ns"], None, None, None, None)
            place = replace(run, project=row["project"], experiment=row["experiment"])
            parts[key] = ChosenRun(place, [])
        # Interned, as in trajectories that are read: results keep the ids, and share them so.
        parts[key].trace_ids.append(intern(row["trace_id"]))
        if row["spans_pruned"] is not None:
            parts[key].pruned[row["trace_id"]] = row["spans_pruned"]
    return list(parts.values())


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield rows as dicts, with few in memory at a time: a selection may be a whole store."""
    for batch in table.to_batches(max_chunksize=1000):
        yield from batch.to_pylist()


def runs(store: Store, filters: Filters = _NONE) -> Iterator[Run]:
    """Yield the attempts of runs that filters choose, the earliest first.

    Raises:
        QueryError: a filter is not valid.
    """
    condition, params = filters.where_clause("runs")
    sql = f"select * from runs where {condition} order by start_ns, run_id, attempt"
    for row in store.own_sql(sql, params, filters):
        config = None if row["config"] is None else from_json(row["config"])
        versions = fields_from_json(row["versions"])
        host = row["hosts"][0] if row["hosts"] else None
        yield Run(
            row["run_id"], row["attempt"], row["project"], row["experiment"], row["start_ns"],
            row["end_ns"], host, row["command"], config, versions,
        )  # fmt: skip
