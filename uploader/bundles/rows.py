"""The rows of a selection, redacted and in a fixed order."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from localtrace.errors import StoreError
from localtrace.redaction.redaction import Redaction
from localtrace.schema import FOLDED_COLUMNS, METRICS, RUNS, TABLES, TableSchema
from localtrace.values.codec import parse_json, to_json

if TYPE_CHECKING:
    from localtrace.read.store import Store

Row = dict[str, Any]

_LAST_KEYS = ("trace_id", "seq", "span_id", "name", "time_ns", "event", "writer_id", "writer_seq")
"""Further sort keys after the table's own, so that the order does not depend on the files."""
_TEXT_COLUMNS = ("error", "prompt_text", "output_text")
_JSON_COLUMNS = ("messages", "inputs", "outputs")
_RUN_TEXTS = ("host", "worker", "command", "git_commit")
_RUN_JSON = ("config", "versions", "losses")
_BATCH_MAX = 256
_NOT_FOLDED = f"replace ({', '.join(f'null as {name}' for name in FOLDED_COLUMNS)})"
_TOKENS_AS_ONE_CALL = 512
_ORDERED = f"""
select
    trace_id, run_id,
    1 + coalesce(span_count, 0) + coalesce(output_tokens, 0) // {_TOKENS_AS_ONE_CALL} as weight
from stored.trajectories
where trace_id in (select unnest($trace_ids))
order by project, experiment, step nulls last, sample_index nulls last, rollout_n nulls last,
    trace_id
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole trajectories."""

    trace_ids: list[str]
    weight: int
    """An estimate of the work: one for each trajectory, each call and every 512 tokens."""
    tables: dict[str, pa.Table]
    texts: bytes
    """One line of JSON per call, with all its texts."""
    redactions: Counter[str]
    unsearched: Counter[str]
    """Amount of content that could not be searched for keys, by kind."""

    @property
    def size_bytes(self) -> int:
        """Size in memory, uncompressed."""
        return len(self.texts) + sum(int(table.nbytes) for table in self.tables.values())


class SelectedRows:
    """The rows of chosen trajectories and of their runs, read from a store."""

    def __init__(self, store: Store, redaction: Redaction, trace_ids: Sequence[str]) -> None:
        self._store = store
        self._redaction = redaction
        found = store.own_sql(_ORDERED, {"trace_ids": list(trace_ids)}).to_arrow()
        self.trace_ids: list[str] = found["trace_id"].to_pylist()
        """The chosen ids in the order of the bundle."""
        self._weights: list[int] = found["weight"].to_pylist()
        self.run_ids: list[str] = sorted(pc.unique(found["run_id"]).to_pylist())

    def counts(self) -> dict[str, int]:
        """Count the rows of the selection by table."""
        runs, ids = "run_id in (select unnest($ids))", "trace_id in (select unnest($ids))"
        counts = {}
        for table in TABLES.values():
            whole_runs = table in (RUNS, METRICS)
            query = f"select count(*) as n from stored.{table.name} where "
            query += runs if whole_runs else ids
            params = {"ids": self.run_ids if whole_runs else self.trace_ids}
            counts[table.name] = self._store.own_sql(query, params).to_dicts()[0]["n"]
        return counts

    def left_out(self) -> dict[str, int]:
        """Count the trajectories of the same runs that are not here whole, by reason."""
        query = """
        select
            count(*) filter (not chosen) as others,
            count(*) filter (not chosen and superseded) as superseded,
            count(spans_pruned) filter (chosen) as pruned
        from (select *, trace_id in (select unnest($trace_ids)) as chosen from stored.flagged)
        where run_id in (select unnest($run_ids))
        """
        params = {"run_ids": self.run_ids, "trace_ids": self.trace_ids}
        (found,) = self._store.own_sql(query, params).to_dicts()
        counts = {
            "superseded by a newer attempt": found["superseded"],
            "not selected": found["others"] - found["superseded"],
            "only their calls, which were pruned": found["pruned"],
        }
        return {reason: count for reason, count in counts.items() if count}

    def of_runs(self) -> tuple[dict[str, pa.Table], Counter[str]]:
        """Return all rows about the runs by table, and what was redacted in them by rule."""
        before = self._redaction.counts.copy()
        tables = {}
        for table in (RUNS, METRICS):
            query = f"select * from stored.{table.name} where run_id in (select unnest($run_ids))"
            rows = self._store.own_sql(query, {"run_ids": self.run_ids}).to_arrow()
            tables[table.name] = _ordered(rows, table)
        runs = [self._run(row) for row in tables["runs"].to_pylist()]
        tables["runs"] = pa.Table.from_pylist(runs, schema=RUNS.arrow())
        tables["metrics"] = self._metrics(tables["metrics"])
        return tables, self._redaction.counts - before

    def _run(self, row: Row) -> Row:
        for name in _RUN_TEXTS:
            if row[name] is not None:
                row[name] = self._redaction.text(row[name])
        for name in _RUN_JSON:
            if row[name] is not None:
                value = _parsed(row, name)
                safe = self._redaction.value(value)
                if safe is not value:
                    row[name] = to_json(safe)
        return row

    def _metrics(self, rows: pa.Table) -> pa.Table:
        names = pc.unique(rows["name"]).to_pylist()
        safe = {name: self._redaction.text(name) for name in names if name is not None}
        if all(safe[name] is name for name in safe):
            return rows
        column = pa.array([safe.get(name) for name in rows["name"].to_pylist()], pa.string())
        return rows.set_column(rows.schema.get_field_index("name"), "name", column)

    def batch_at(self, start: int, weight_max: int) -> Batch:
        """Read whole trajectories from index `start` on, at least one.

        Args:
            weight_max: limit on the batch's weight; only a single trajectory may exceed it.
        """
        end = start + 1
        left = weight_max - self._weights[start]
        while end < min(len(self.trace_ids), start + _BATCH_MAX) and self._weights[end] <= left:
            left -= self._weights[end]
            end += 1
        return self._batch(self.trace_ids[start:end], sum(self._weights[start:end]))

    def _batch(self, trace_ids: list[str], weight: int) -> Batch:
        names = {f"id_{number}": trace_id for number, trace_id in enumerate(trace_ids)}
        chosen = f"trace_id in ({', '.join(f'${name}' for name in names)})"
        trajectories = self._read("trajectories", chosen, names)
        # With the steps named, DuckDB skips the files of all other steps.
        steps = set(trajectories["step"].to_pylist()) - {None}
        in_steps = f"(step is null or step in ({', '.join(map(str, sorted(steps))) or 'null'}))"
        tables = {
            "trajectories": trajectories,
            "spans": self._read("spans", f"{chosen} and {in_steps}", names),
            "outcomes": self._read("outcomes", chosen, names),
        }
        before = self._redaction.counts.copy(), self._redaction.unsearched.copy()
        whole, calls, values = (table.to_pylist() for table in tables.values())
        safe = self._redaction.rows(whole, calls, values, self._store.decode)
        for (name, table), rows, edited in zip(
            tables.items(), (whole, calls, values), safe, strict=True
        ):
            if any(new is not row for new, row in zip(edited, rows, strict=True)):
                tables[name] = pa.Table.from_pylist(edited, schema=table.schema)
        redactions = self._redaction.counts - before[0]
        unsearched = self._redaction.unsearched - before[1]
        return Batch(trace_ids, weight, tables, _texts(safe[1]), redactions, unsearched)

    def _read(self, name: str, condition: str, params: Mapping[str, str]) -> pa.Table:
        # A bundle holds outcomes as rows alone, whether or not they were folded.
        kept = {"trajectories": _NOT_FOLDED, "outcomes": "replace (false as folded)"}.get(name, "")
        query = f"select * {kept} from stored.{name} where {condition}"
        return _ordered(self._store.own_sql(query, params).to_arrow(), TABLES[name])


def _parsed(row: Row, name: str) -> Any:
    try:
        return parse_json(row[name])
    except ValueError as error:
        raise StoreError(
            f"the {name} of run {row['run_id']} cannot be read, so it cannot be searched for keys "
            f"({error}): leave that run out"
        ) from None


def _ordered(rows: pa.Table, table: TableSchema) -> pa.Table:
    rows = rows.select(list(table.column_names)).cast(table.arrow())
    keys = [*table.sort_by, *(key for key in _LAST_KEYS if key in table.column_names)]
    return rows.sort_by([(key, "ascending") for key in dict.fromkeys(keys)])


def _texts(spans: list[Row]) -> bytes:
    lines = []
    for row in spans:
        line = {name: row[name] for name in ("trace_id", "step", "seq", "op")}
        line |= {name: row[name] for name in _TEXT_COLUMNS if row[name] is not None}
        line |= {
            name: msgspec.Raw(row[name].encode()) for name in _JSON_COLUMNS if row[name] is not None
        }
        lines.append(msgspec.json.encode(line) + b"\n")
    return b"".join(lines)


def open_texts(file: Any) -> gzip.GzipFile:
    """Open a gzip stream whose header holds neither a time nor a name: same texts, same bytes."""
    return gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0)
