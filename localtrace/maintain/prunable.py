"""The choice of what to prune: whole groups, by rules and filters; and what that frees.

Nothing here changes a store. A group is chosen only where every member is considered by the
filters, is sealed, and is kept by no rule.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from localtrace.errors import QueryError, StoreError
from localtrace.field_names import LABEL_NAMES
from localtrace.maintain.damage import Damage
from localtrace.read.filters import Filters
from localtrace.read.query_limits import Limits
from localtrace.read.result import Result
from localtrace.read.store import Store
from localtrace.schema import SPANS, TABLES
from localtrace.store.gathered import gathered_rows
from localtrace.store.journal.disk import size_of
from localtrace.store.layout import StoreLayout
from localtrace.store.sealing.retention_rules import Retention
from localtrace.store.sealing.sampled_rollouts import Rollout, Step, group_digest
from localtrace.store.sealing.sampling import kept_groups
from localtrace.store.tables.delta import CommittedFile, committed_files, open_table
from localtrace.store.tables.parquet_files import partition_values

_Row: TypeAlias = Mapping[str, Any]

CHOOSING_MAX_S = 3600.0
"""Time for the query that finds the facts which rules look at."""
CHOOSING_MAX_BYTES = 2**30
"""Memory that DuckDB may use for it beside training."""
NOT_SEALED = "their journals are not sealed yet"
NOT_CONSIDERED = "a rollout of their group does not match the filters"
TOO_NEW = "newer than --older-than"
IN_STRIDE = "their steps are kept by --keep-every"
NO_STEP = "no step is known, which --keep-every leaves alone"
NOT_GATHERED = "no other store is known to have gathered them"
BY_RULE = "kept by --keep"
NOT_NEEDED = "not needed to reach the size"
DAMAGED = "a file of their partition is damaged"
_FACTS_SQL = f"""
with considered as (select trace_id from {{relation}} where {{condition}}),
elsewhere as (
    select unnest($writers::varchar[]) as writer, unnest($numbers::bigint[]) as number
),
calls as (
    select
        trace_id, count(*) as rows, bool_or(status <> 'ok') as failed,
        bool_or(is_turn and coalesce(is_cut_off(finish_reason), false)) as truncated,
        bool_and(coalesce(writer_seq <= number, false)) as gathered
    from stored.spans left join elsewhere on writer = writer_id
    group by trace_id
),
labelled as (
    select trace_id from outcomes
    where name in ({", ".join(f"'{name}'" for name in LABEL_NAMES)})
        and (number is not null or "text" is not null)
),
uploaded as (select trace_id from uploads where state in ('sent', 'already there'))
select
    t.project, t.experiment, t.run_id, t.attempt, t.step, t.validate, t.trace_id, t.group_id,
    t.sample_index, t.prompt_hash, t.reward, coalesce(t.end_ns, t.start_ns) as end_ns,
    coalesce(calls.rows, 0) as rows,
    t.status <> 'ok' or coalesce(calls.failed, false) as failed,
    coalesce(calls.truncated, false)
        or coalesce(t.attributes ->> '$.truncated' = 'true', false) as truncated,
    coalesce(calls.gathered, true) as gathered,
    t.trace_id in (from considered) as considered,
    t.trace_id in (from labelled) as labelled,
    t.trace_id in (from uploaded) as uploaded
from all_trajectories as t
left join calls on calls.trace_id = t.trace_id
order by t.run_id, t.attempt, t.validate, t.step, t.trace_id
"""
_STEP = itemgetter("run_id", "attempt", "validate", "step")


class Part(NamedTuple):
    """The trajectories and calls of one step that are pruned."""

    run_id: str
    attempt: int
    step: int | None
    validate: bool
    trajectories: int
    rows: int
    size_bytes: int
    """The bytes of files that the rows take, about."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group of rollouts with calls in table files."""

    step: tuple[str, int, bool, int | None]
    """Run, attempt, whether it is validation, and step."""
    trace_ids: tuple[str, ...]
    """Those of its rollouts that have calls."""
    end_ns: int
    """The end of the last one."""
    rows: int
    size_bytes: int


@dataclass(slots=True)
class Choice:
    """The groups to prune."""

    rule: str
    """The rules and filters, as they were written."""
    groups: list[Group] = field(default_factory=list)
    """The oldest first."""
    left_alone: Counter[str] = field(default_factory=Counter)
    """Trajectories with calls that stay, by reason."""
    problems: list[str] = field(default_factory=list)
    """Files that are damaged, and what to do about each."""
    store_bytes: int = 0
    """The size of the store, without files that wait to be deleted."""
    to_size_bytes: int | None = None

    @property
    def trace_ids(self) -> list[str]:
        """The trajectories to prune."""
        return [trace_id for group in self.groups for trace_id in group.trace_ids]

    @property
    def size_bytes(self) -> int:
        """The bytes of files that are freed, about."""
        return sum(group.size_bytes for group in self.groups)

    @property
    def excess_bytes(self) -> int:
        """The bytes that the store is still too large after the pruning, about."""
        if self.to_size_bytes is None:
            return 0
        return max(0, self.store_bytes - self.size_bytes - self.to_size_bytes)

    def parts(self) -> list[Part]:
        """Return the sums of each step, in order."""
        sums: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0])
        for group in self.groups:
            of = sums[group.step]
            of[0] += len(group.trace_ids)
            of[1] += group.rows
            of[2] += group.size_bytes
        ordered = sorted(sums, key=lambda of: (*of[:3], of[3] is None, of[3] or 0))
        return [
            Part(run_id, attempt, step, validate, *sums[run_id, attempt, validate, step])
            for run_id, attempt, validate, step in ordered
        ]


def choose(
    store: Store,
    layout: StoreLayout,
    retention: Retention,
    filters: Filters | None = None,
    now_ns: int | None = None,
) -> Choice:
    """Choose what to prune.

    Args:
        store: the only store that is looked at, open.
        layout: the same store.
        retention: the rules.
        filters: which trajectories are considered; None: all, superseded ones too.
        now_ns: the time that ages are counted from; None: now.

    Raises:
        QueryError: the filters cannot be run.
        StoreError: a table cannot be opened.
    """
    filters = filters or Filters()
    facts, damage = _facts(store, layout, filters)
    rule = " ".join(filter(None, [retention.text, str(filters)]))
    choice = Choice(rule, store_bytes=live_bytes(layout), to_size_bytes=retention.to_size_bytes)
    choice.problems += damage.problems
    judge = _Judge(retention, _unsealed(store), time.time_ns() if now_ns is None else now_ns)
    bytes_per_row = _row_sizes(layout)
    for step, rows in groupby(facts, _STEP):
        for members, reason in judge.groups(list(rows)):
            if any(map(damage.touches, members)):
                choice.left_alone[DAMAGED] += len(members)
                continue
            called = [row for row in members if row["rows"]]
            if not called:
                continue
            if reason is None:
                choice.groups.append(_group(step, called, bytes_per_row))
            else:
                choice.left_alone[reason] += len(called)
    choice.groups.sort(key=lambda group: (group.end_ns, group.trace_ids))
    _keep_what_fits(choice)
    return choice


def _facts(store: Store, layout: StoreLayout, filters: Filters) -> tuple[Result, Damage]:
    """Return what rules look at, of all trajectories; without what damaged files hold."""
    condition, params = filters.where_clause()
    elsewhere = gathered_rows(layout, SPANS.name)
    params |= {"writers": list(elsewhere), "numbers": list(elsewhere.values())}
    relation = filters.relation(with_superseded=True)
    sql = _FACTS_SQL.format(relation=relation, condition=condition)
    try:
        return store.own_sql(sql, params, filters), Damage()
    except (QueryError, StoreError):
        damage = Damage.find(layout)
        if not damage.paths:
            raise
        with damage.store_without(layout, Limits(CHOOSING_MAX_S, CHOOSING_MAX_BYTES)) as others:
            return others.own_sql(sql, params, filters), damage


class _Judge:
    """The reasons why groups stay."""

    def __init__(self, retention: Retention, unsealed: frozenset[str], now_ns: int) -> None:
        self._retention = retention
        self._unsealed = unsealed
        age_s = retention.older_than_s
        self._newest_ns = None if age_s is None else now_ns - int(age_s * 1e9)

    def groups(self, rows: list[_Row]) -> Iterator[tuple[list[_Row], str | None]]:
        """Yield the groups of one step that are considered, and why each stays; None: it goes."""
        rollouts = {row["trace_id"]: _rollout(row) for row in rows}
        kept = kept_groups(self._retention.keep, rollouts)
        members: dict[str, list[_Row]] = defaultdict(list)
        for row in rows:
            members[rollouts[row["trace_id"]].group].append(row)
        for group, found in members.items():
            if any(row["considered"] for row in found):
                yield found, BY_RULE if group in kept else self._reason(found)

    def _reason(self, rows: list[_Row]) -> str | None:
        stride, newest_ns = self._retention.keep_every, self._newest_ns
        if not all(row["considered"] for row in rows):
            return NOT_CONSIDERED
        if any(row["trace_id"] in self._unsealed for row in rows):
            return NOT_SEALED
        if self._retention.gathered and not all(row["gathered"] for row in rows):
            return NOT_GATHERED
        if newest_ns is not None and any(row["end_ns"] > newest_ns for row in rows):
            return TOO_NEW
        if stride is not None:
            step = rows[0]["step"]
            if step is None:
                return NO_STEP
            if step % stride == 0:
                return IN_STRIDE
        return None


def _rollout(row: _Row) -> Rollout:
    of = (row["run_id"], row["attempt"], row["step"], row["validate"])
    group = group_digest(
        of, row["group_id"], row["sample_index"], row["prompt_hash"], trace_id=row["trace_id"]
    )
    reward = float("nan") if row["reward"] is None else row["reward"]
    return Rollout(
        Step(*of, None if row["step"] is not None else group),
        group,
        row["sample_index"],
        reward,
        failed=row["failed"],
        truncated=row["truncated"],
        labelled=row["labelled"],
        uploaded=row["uploaded"],
    )


def _group(
    step: tuple[str, int, bool, int | None], rows: list[_Row], bytes_per_row: Mapping[Any, float]
) -> Group:
    size_bytes = sum(row["rows"] * bytes_per_row.get(_partition_of(row), 0.0) for row in rows)
    return Group(
        step,
        tuple(row["trace_id"] for row in rows),
        max(row["end_ns"] for row in rows),
        sum(row["rows"] for row in rows),
        round(size_bytes),
    )


def _keep_what_fits(choice: Choice) -> None:
    """Leave out the newest groups where the oldest ones free enough."""
    if choice.to_size_bytes is None:
        return
    excess_bytes = choice.store_bytes - choice.to_size_bytes
    for place, group in enumerate(choice.groups):
        if excess_bytes <= 0:
            choice.left_alone[NOT_NEEDED] += sum(
                len(one.trace_ids) for one in choice.groups[place:]
            )
            del choice.groups[place:]
            return
        excess_bytes -= group.size_bytes


def _unsealed(store: Store) -> frozenset[str]:
    """Return the trajectories of which a part is only in journals."""
    found: set[str] = set()
    for snapshot in store.snapshots:
        for name in ("trajectories", "spans"):
            found.update(snapshot.pending[name]["trace_id"].unique().to_pylist())
    return frozenset(found)


def _partition_of(row: _Row) -> tuple[str | None, ...]:
    return row["project"], row["experiment"], None if row["step"] is None else str(row["step"])


def _row_sizes(layout: StoreLayout) -> dict[tuple[str | None, ...], float]:
    """Return the mean bytes of a row in files, by partition of `spans`."""
    sums: dict[tuple[str | None, ...], list[int]] = defaultdict(lambda: [0, 0])
    values_of = cache(partition_values)
    for file in committed_files(open_table(layout, SPANS)):
        of = sums[tuple(values_of(file.folder).values())]
        of[0] += file.size_bytes
        of[1] += file.rows or 0
    return {partition: size / max(1, rows) for partition, (size, rows) in sums.items()}


def live_bytes(layout: StoreLayout) -> int:
    """Return the size of a store without table files that wait to be deleted."""
    return size_of(layout.root) - sum(
        size_of(layout.table(name)) - _named_bytes(layout, name) for name in TABLES
    )


def _named_bytes(layout: StoreLayout, name: str) -> int:
    """Return the bytes of a table's state and log."""
    files: Iterable[CommittedFile] = committed_files(open_table(layout, TABLES[name]))
    return sum(file.size_bytes for file in files) + size_of(layout.table(name) / "_delta_log")
