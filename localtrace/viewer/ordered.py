"""Trajectories that match filters, in an order: the rows that are seen, and a row's neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from localtrace.read.filters import Filters
from localtrace.read.labels import labels_of
from localtrace.read.trajectories import listed_ids, listed_steps
from localtrace.viewer.asked import Asked
from localtrace.viewer.excerpts import with_texts
from localtrace.viewer.numbers import is_not_finite

if TYPE_CHECKING:
    import pyarrow as pa

SORTS = {
    "step": "step",
    "reward": "finite(reward)",
    "advantage": "finite(advantage)",
    "tokens": "output_tokens",
    "turns": "turn_count",
    "time": "start_ns",
    "duration": "end_ns - start_ns",
}
"""Keys of orders by the name in the address, where `-` before it turns the order round.

Rows that are alike in it stand in the order of the store, the newest steps first. So the first rows
are in few steps, and DuckDB reads these alone.
"""
_COLUMNS = """
    trace_id, run_id, step, sample_index, rollout_n, validate, status, error, reward, advantage,
    fate, fate_reason, turn_count, output_tokens, start_ns, end_ns, agent, data_source, group_key,
    spans_pruned
"""
_LATE = ("reward", "advantage", "fate", "fate_reason")
_BADGES_SQL = """
select
    trace_id,
    coalesce(is_cut_off(arg_max_null(finish_reason, seq) filter (is_turn)), false) as truncated,
    coalesce(
        says_nothing(arg_max_null(said(output_text, output_message), seq) filter (is_turn)), false
    ) as empty,
    count(*) filter (status = 'error' and not is_turn) as errors
from stored.spans where {chosen} group by trace_id
"""
_TOOL_ERRORS_SQL = """
select trace_id, count(*) as errors from stored.calls
where {chosen} and status = 'error' and kind = 'tool' group by trace_id
"""


class Ordered(Protocol):
    """The ids of all trajectories that match, in their order."""

    def __len__(self) -> int: ...

    def index(self, trace_id: str) -> int | None:
        """Return the place of a trajectory; None where it is not among them."""

    def slice(self, start: int, end: int) -> dict[str, int | None]:
        """Return the ids of some places with their steps, in order."""


@dataclass(frozen=True)
class _Sorted:
    """All ids, sorted together."""

    ids: pa.Array
    steps: pa.Array

    def __len__(self) -> int:
        return len(self.ids)

    def index(self, trace_id: str) -> int | None:
        return _index(self.ids, trace_id)

    def slice(self, start: int, end: int) -> dict[str, int | None]:
        part = slice(max(start, 0), max(end, 0))
        return dict(zip(self.ids[part].to_pylist(), self.steps[part].to_pylist(), strict=True))


class _ByStep:
    """The ids of each step, sorted when somebody looks at the step."""

    def __init__(self, asked: Asked, is_last_first: bool) -> None:
        self._asked = asked
        self._counts = counts_by_step(asked)
        known = sorted((one for one in self._counts if one is not None), reverse=is_last_first)
        self.steps = [*known, *([None] if None in self._counts else [])]
        """The steps in their order."""

    def __len__(self) -> int:
        return sum(self._counts.values())

    def index(self, trace_id: str) -> int | None:
        sql = "select step from stored.trajectories where trace_id = $id"
        for row in self._asked.rows(sql, {"id": trace_id}):
            if row["step"] in self._counts:
                at = _index(self._ids(row["step"]), trace_id)
                before = self.steps[: self.steps.index(row["step"])]
                return None if at is None else sum(map(self._counts.__getitem__, before)) + at
        return None

    def slice(self, start: int, end: int) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        before = 0
        for step in self.steps:
            part = slice(max(start - before, 0), max(end - before, 0))
            if part.start < self._counts[step] and part.stop:
                found |= dict.fromkeys(self._ids(step)[part].to_pylist(), step)
            before += self._counts[step]
        return found

    def first(self, count: int) -> Iterator[int | None]:
        """Yield the steps of the first rows."""
        for step in self.steps:
            if count <= 0:
                return
            yield step
            count -= self._counts[step]

    def _ids(self, step: int | None) -> pa.Array:
        asked, sort = self._asked, sort_of(self._asked)

        def make() -> pa.Array:
            condition, params = asked.filters.where_clause()
            at = "step is null" if step is None else f"step = {step}"
            sql = (
                f"select trace_id from {asked.filters.relation()} where {condition} and {at} "
                f"order by {order_by(sort)}"
            )
            return asked.table(sql, params)["trace_id"].combine_chunks()

        return asked.kept(("ids", asked.q, sort, step), make)


def _index(ids: pa.Array, trace_id: str) -> int | None:
    import pyarrow.compute as pc

    at = int(pc.index(ids, trace_id).as_py())
    return None if at < 0 else at


def sort_of(asked: Asked) -> str:
    """Return the name of the order that is asked for; the newest steps first otherwise."""
    given = asked.values.get("sort") or ""
    return given if given.removeprefix("-") in SORTS else "-step"


def order_by(sort: str) -> str:
    """Return an order as SQL."""
    return f"{_key_order(sort)}, sample_index, rollout_n, trace_id"


def _key_order(sort: str) -> str:
    direction = "desc nulls last" if sort.startswith("-") else "asc nulls last"
    then = "" if _is_by_step(sort) else ", step desc nulls last"
    return f"{SORTS[sort.removeprefix('-')]} {direction}{then}"


def _is_by_step(sort: str) -> bool:
    return sort.removeprefix("-") == "step"


def ordered(asked: Asked) -> Ordered:
    """Return all trajectories that match the filters of a request."""
    sort = sort_of(asked)
    if _is_by_step(sort):
        return _ByStep(asked, sort.startswith("-"))

    def make() -> Ordered:
        condition, params = asked.filters.where_clause()
        relation = asked.filters.relation(sort.removeprefix("-"))
        found = asked.table(
            f"select trace_id, step from {relation} where {condition} order by {order_by(sort)}",
            params,
        )
        return _Sorted(found["trace_id"].combine_chunks(), found["step"].combine_chunks())

    made: Ordered = asked.kept(("ordered", asked.q, sort), make)
    return made


def total_of(asked: Asked) -> int:
    """Return the number of trajectories that match the filters of a request."""
    return sum(counts_by_step(asked).values())


def first_rows(asked: Asked, count: int) -> list[dict[str, Any]]:
    """Return the first rows, without sorting all and without their texts and badges."""
    sort = sort_of(asked)

    def make() -> list[dict[str, Any]]:
        condition, params = asked.filters.where_clause()
        if _is_by_step(sort):
            near = listed_steps(_ByStep(asked, sort.startswith("-")).first(count))
        else:
            near, bound = _near(asked, sort, count)
            params = params | bound
        return asked.rows(
            f"select {_COLUMNS} from {asked.filters.relation(*_LATE)} where {condition} and {near} "
            f"order by {order_by(sort)} limit {count}",
            params,
        )

    made: list[dict[str, Any]] = asked.kept(("first", asked.q, sort, count), make)
    return made


def counts_by_step(asked: Asked) -> dict[int | None, int]:
    """Return the number of trajectories of each step that match the filters of a request."""

    def make() -> dict[int | None, int]:
        condition, params = asked.filters.where_clause()
        relation = asked.filters.relation()
        sql = f"select step, count(*) as n from {relation} where {condition} group by step"
        return {row["step"]: row["n"] for row in asked.rows(sql, params)}

    made: dict[int | None, int] = asked.kept(("by step", asked.q), make)
    return made


def _near(asked: Asked, sort: str, count: int) -> tuple[str, dict[str, Any]]:
    """Return a condition that the first rows meet and few others, with its parameter."""
    key = SORTS[sort.removeprefix("-")]
    condition, params = asked.filters.where_clause()
    # Two columns are read in a third of the time of the ids alone.
    rows = asked.rows(
        f"select {key} as key, step from {asked.filters.relation(sort.removeprefix('-'))} "
        f"where {condition} order by {_key_order(sort)} limit {count}",
        params,
    )
    steps = listed_steps(row["step"] for row in rows)
    if len(rows) < count or rows[-1]["key"] is None:
        return steps, {}
    sign = ">=" if sort.startswith("-") else "<="
    return f"{steps} and {key} {sign} $last_key", {"last_key": rows[-1]["key"]}


def rows_of(asked: Asked, steps: dict[str, int | None]) -> list[dict[str, Any]]:
    """Return the rows of trajectories in the given order, without their texts and badges."""
    if not steps:
        return []
    chosen, params = _chosen(steps)
    sql = f"select {_COLUMNS} from {Filters().relation(*_LATE)} where {chosen}"
    found = {row["trace_id"]: row for row in asked.rows(sql, params)}
    return [found[trace_id] for trace_id in steps if trace_id in found]


def with_calls(asked: Asked, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with what takes longer to read: texts, badges and labels."""
    if not rows:
        return []
    steps = {row["trace_id"]: row["step"] for row in rows}
    labels = labels_of(asked.table, steps)
    chosen, params = _chosen(steps)
    seen = {row["trace_id"]: row for row in asked.rows(_BADGES_SQL.format(chosen=chosen), params)}
    # To derive the kind of a call takes all calls around it, and few rollouts have failed calls.
    failed = {row["trace_id"]: row["step"] for row in rows if _errors(seen, row)}
    if failed:
        chosen, params = _chosen(failed)
        sql = _TOOL_ERRORS_SQL.format(chosen=chosen)
        failed = {row["trace_id"]: row["errors"] for row in asked.rows(sql, params)}
    return [
        row
        | {
            "badges": _badges(row, seen.get(row["trace_id"]), failed.get(row["trace_id"]) or 0),
            "labels": asdict(labels[row["trace_id"]]) if row["trace_id"] in labels else None,
        }
        for row in with_texts(asked, rows)
    ]


def _errors(seen: dict[str, Any], row: dict[str, Any]) -> bool:
    return row["trace_id"] in seen and seen[row["trace_id"]]["errors"] > 0


def _chosen(steps: dict[str, int | None]) -> tuple[str, dict[str, str]]:
    in_ids, params = listed_ids(steps)
    return f"{in_ids} and {listed_steps(steps.values())}", params


def _badges(row: dict[str, Any], seen: dict[str, Any] | None, errors: int) -> list[str]:
    found = [] if row["status"] == "ok" else [row["status"]]
    found += ["reward not finite"] if is_not_finite(row["reward"]) else []
    if seen is None:
        return [*found, "no calls" if row["spans_pruned"] is None else "calls pruned"]
    found += [name for name in ("truncated", "empty") if seen[name]]
    return [*found, f"{errors} tool error{'s' * (errors > 1)}"] if errors else found
