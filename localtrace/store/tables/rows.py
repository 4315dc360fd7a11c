"""From the records of journals to the rows of tables; the same for sealing and for live reading."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import msgspec
import pyarrow as pa

from localtrace.field_names import TOKEN_OUTCOMES
from localtrace.schema import TABLES, TableSchema
from localtrace.store.journal.frames import Frames
from localtrace.store.journal.journal_files import JournalName, JournalStatus
from localtrace.store.journal.records import (
    STATUSES,
    Begin,
    Call,
    Closed,
    End,
    Envelope,
    MetricsRecord,
    Opened,
    OutcomeRecord,
    RunRecord,
    call_trace_id,
    encode_context,
    read_envelopes,
)
from localtrace.store.tables.damage import Damage
from localtrace.store.tables.spans import SpanReader, head_columns, started_at
from localtrace.store.tokenizers import Decode
from localtrace.values import codec
from localtrace.values.doubles import floats
from localtrace.values.encoded import is_list, is_list_of_lists, raw_items, raw_map
from localtrace.values.plain_json import valid_text
from localtrace.values.token_lists import read_numbers

_FOLDER_NAME_MAX_BYTES = 240
"""Longest value of a partition: file systems allow 255 bytes, of which `experiment=` takes 11."""
_NO_PLACE = (pa.ArrowException, OverflowError, TypeError, ValueError)
"""Errors raised for a value that a column's type cannot hold."""


class JournalRows:
    """The rows of any number of journals, by table."""

    def __init__(self, decode: Decode | None = None) -> None:
        """Begin without rows.

        Args:
            decode: turns token ids into text.
        """
        self.columns = {name: Columns(schema) for name, schema in TABLES.items()}
        self.damage = Damage()
        self.calls_passed = 0
        """Calls that were not read."""
        self.unreadable: set[JournalName] = set()
        """Journals of which a part cannot be read."""
        self._journals: list[JournalName] = []
        self._ends: dict[str, list[int]] = {name: [] for name in TABLES}
        """Number of rows after each journal, by table."""
        self.decode = decode or (lambda run_id, ids: None)

    def add_journal(
        self,
        name: JournalName,
        frames: Frames,
        status: JournalStatus,
        calls_of: Container[str] | None = None,
    ) -> None:
        """Add one journal.

        Args:
            status: tells what became of trajectories that do not end in this journal.
            calls_of: the trajectories whose calls are read; None: all. Other calls are only
                counted, and what is wrong with them is not noticed.
        """
        damaged_before = self.damage.records
        self.damage.records += len(frames.damaged)
        if status is not JournalStatus.LIVE:  # else the writer is in the middle of its last frame
            self.damage.torn_tails += frames.tail_start is not None
        reader = _JournalReader(self)
        payloads = frames.payloads if calls_of is None else reader.chosen(frames.payloads, calls_of)
        for envelope in read_envelopes(payloads):
            self.damage.records += envelope is None or not reader.try_add(envelope)
        reader.add_prompt_hashes()
        if status is JournalStatus.LAST or reader.closed:
            reader.end_open("interrupted")
        elif status is JournalStatus.LIVE:
            reader.end_open("running")
        self.damage.prompts += reader.spans.lost_prompts
        self._journals.append(name)
        for table, columns in self.columns.items():
            self._ends[table].append(len(columns))
        if self.damage.records > damaged_before:
            self.unreadable.add(name)

    def tables(self) -> dict[str, pa.Table]:
        """Make tables of all rows.

        A row with a value that does not fit its column is left out, and counts as damaged.
        """
        tables = {}
        for name, columns in self.columns.items():
            tables[name], left_out = columns.table()
            self.damage.records += len(left_out)
            ends = self._ends[name]
            self.unreadable |= {self._journals[bisect_right(ends, place)] for place in left_out}
        return tables


class _JournalReader:
    """The state of reading one journal from its first record to its last."""

    def __init__(self, rows: JournalRows) -> None:
        self._rows = rows
        self.spans = SpanReader(rows.decode)
        self._open: dict[bytes, tuple[dict[str, Any], Begin]] = {}
        self._opened: dict[str, Any] = {}
        self._context = b""
        """The encoded context of the newest record."""
        self._calls: dict[bytes, list[bytes]] = {}
        """The calls that were passed over, by trace id."""
        self.closed = False

    def chosen(self, payloads: Iterable[bytes], calls_of: Container[str]) -> Iterator[bytes]:
        """Pass over the calls of other trajectories, which are only counted."""
        for payload in payloads:
            trace_id = call_trace_id(payload, self._context)
            if trace_id is None or trace_id.hex() in calls_of:
                yield payload
            else:
                self._calls.setdefault(trace_id, []).append(payload)
                self._rows.calls_passed += 1

    def add_prompt_hashes(self) -> None:
        """Give unfinished trajectories the identity of their prompt, which only a call has yet."""
        for trace_id, (_, begin) in self._open.items():
            for envelope in read_envelopes(self._calls.get(trace_id, ())):
                if begin.prompt_hash is not None:
                    break
                if envelope is not None and isinstance(envelope.record, Call):
                    begin.prompt_hash = envelope.record.prompt_hash

    def try_add(self, envelope: Envelope) -> bool:
        """Add the rows of one record; return False where localtrace did not write it."""
        try:
            self._add(envelope)
        except Exception:  # the other records must stay readable
            return False
        return True

    def _add(self, envelope: Envelope) -> None:
        record = envelope.record
        self._context = encode_context(envelope.context)
        if not all(map(_is_folder_name, (envelope.context.project, envelope.context.experiment))):
            raise ValueError("no folder can have this name")
        common = {
            **self._opened,
            **msgspec.structs.asdict(envelope.context),
            "writer_seq": envelope.seq,
        }
        rows: Iterable[dict[str, Any]]
        table, rows = "", ()
        if isinstance(record, Call):
            if record.prompt_hash and record.head.trace_id in self._open:
                # The end record has it too, but an interrupted trajectory has no end record.
                self._open[record.head.trace_id][1].prompt_hash = record.prompt_hash
            table, rows = "spans", self.spans.rows(record, envelope.context.run_id)
        elif isinstance(record, Begin):
            self._open[record.head.trace_id] = (common, record)
        elif isinstance(record, End):
            self._open.pop(record.begin.head.trace_id, None)
            table, rows = "trajectories", [_trajectory(record)]
        elif isinstance(record, OutcomeRecord):
            table, rows = "outcomes", list(_outcomes(record))
        elif isinstance(record, MetricsRecord):
            table = "metrics"
            rows = [
                {"step": record.step, "name": name, "value": value, "time_ns": record.time_ns}
                for name, value in record.values.items()
            ]
        elif isinstance(record, RunRecord):
            table, rows = "runs", [_run(record)]
        elif isinstance(record, Opened):
            self._opened = {"writer_id": record.writer_id, "host": record.host, "pid": record.pid}
        elif isinstance(record, Closed):
            self.closed = True
        for row in rows:
            self._rows.columns[table].add(common | row)

    def end_open(self, status: str) -> None:
        """Give a row to every trajectory that has begun and not ended."""
        for common, begin in self._open.values():
            end = End(begin, 0, STATUSES.index(status), None, msgspec.Raw(b"\x80"), 0)
            row = _trajectory(end)
            row |= dict.fromkeys(("end_ns", "span_count", "turn_count", "output_tokens"))
            self._rows.columns["trajectories"].add(common | row)


@lru_cache
def _is_folder_name(text: str) -> bool:
    """Tell whether a partition's folder can have this name; `init` allows only shorter ones."""
    return len(quote(text, safe="")) <= _FOLDER_NAME_MAX_BYTES


def _trajectory(end: End) -> dict[str, Any]:
    begin = end.begin
    values = raw_map(end.values) or {}
    reward = _as_number(codec.decode(values["reward"])) if "reward" in values else None
    if reward is not None:
        del values["reward"]
    return {
        **head_columns(begin.head),
        "group_id": begin.group_id,
        "validate": begin.validate,
        "name": begin.name,
        "agent": begin.agent,
        "data_source": begin.data_source,
        "prompt_hash": None if begin.prompt_hash is None else begin.prompt_hash.hex(),
        "status": STATUSES[end.status],
        "error": end.error,
        "start_ns": begin.start_ns,
        "end_ns": begin.start_ns + end.duration_ns,
        "started_at": started_at(begin.start_ns),
        "reward": reward,
        "span_count": end.span_count,
        "turn_count": end.turn_count,
        "output_tokens": end.output_tokens,
        "attributes": codec.msgpack_to_json(msgspec.msgpack.encode(values)),
    }


def _as_number(value: Any) -> float | None:
    """Return a number as a double; None for anything else, or where it is too large."""
    try:
        return float(value) if isinstance(value, bool | int | float) else None
    except OverflowError:
        return None


def _outcomes(record: OutcomeRecord) -> Iterator[dict[str, Any]]:
    for name in record.values:
        for trace_id, value in zip(record.trace_ids, _values(record, name), strict=False):
            if value is not None:
                yield {
                    "trace_id": trace_id,
                    "step": record.step,
                    "name": name,
                    "time_ns": record.time_ns,
                    "source": record.source,
                    "folded": False,
                    **_outcome_value(value),
                }


def _values(record: OutcomeRecord, name: str) -> Sequence[Any]:
    """Return the outcome `name` of each trajectory, or null.

    A list of numbers comes as a sequence that is no list. Values per token, by their name, may be
    the one row of an array, and null where they are not known.
    """
    data, is_per_token = record.values[name], name in TOKEN_OUTCOMES
    if not record.batch:
        return [_plain(data, is_per_token)] * len(record.trace_ids)
    items = raw_items(data) or ()
    if any(map(is_list, items)):
        return [_plain(item, is_per_token) for item in items]
    value = _decoded(data)
    return value if isinstance(value, list) else [value] * len(record.trace_ids)


def _plain(data: msgspec.Raw, is_per_token: bool) -> Any:
    numbers = read_numbers(data)
    has_null = isinstance(numbers, list) and None in numbers
    if numbers is None or not (is_per_token or not (has_null or is_list_of_lists(data))):
        return _decoded(data)
    return tuple(numbers) if isinstance(numbers, list) else numbers


def _decoded(data: msgspec.Raw) -> Any:
    value = codec.decode(data)
    return value.tolist() if hasattr(value, "tolist") else value


def _outcome_value(value: Any) -> dict[str, Any]:
    if isinstance(value, array | memoryview | tuple):
        return {"values": floats(value)}
    if isinstance(value, str):
        return {"text": valid_text(value)}
    number = _as_number(value)
    if number is not None:
        return {"number": number}
    return {"text": codec.to_json(value)}


def _run(record: RunRecord) -> dict[str, Any]:
    facts = {name: codec.decode(raw) for name, raw in record.facts.items()}
    for name, value in facts.items():
        if name in ("config", "versions", "losses") and value is not None:
            facts[name] = codec.to_json(value)
        elif isinstance(value, str):
            facts[name] = valid_text(value)
    return {**facts, "event": record.event, "time_ns": record.time_ns}


# -- columns ---------------------------------------------------------------------------------------


class Columns:
    """The growing columns of one table."""

    def __init__(self, schema: TableSchema) -> None:
        self._schema = schema
        self._columns: dict[str, list[Any]] = {name: [] for name in schema.column_names}

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def add(self, row: dict[str, Any]) -> None:
        """Append one row; names that it lacks become null."""
        for name, column in self._columns.items():
            column.append(row.get(name))

    def table(self) -> tuple[pa.Table, list[int]]:
        """Make a sorted table in the schema's types.

        Returns:
            The table, and the positions of rows left out because a value does not fit its
            column.
        """
        if not len(self):
            return self._schema.no_rows(), []
        left_out: list[int] = []
        try:
            table = self._table(self._columns)
        except _NO_PLACE:
            left_out = self._misfits()
            table = self._table(self._without(set(left_out)))
        return table.sort_by([(name, "ascending") for name in self._schema.sort_by]), left_out

    def _table(self, columns: dict[str, list[Any]]) -> pa.Table:
        schema = self._schema.arrow()
        return pa.table(
            [_array(columns[column.name], column.type) for column in schema], schema=schema
        )

    def _misfits(self) -> list[int]:
        fields = self._schema.arrow()
        places = (_misfits(self._columns[column.name], column.type, 0) for column in fields)
        return sorted(set().union(*places))

    def _without(self, left_out: set[int]) -> dict[str, list[Any]]:
        return {
            name: [value for place, value in enumerate(values) if place not in left_out]
            for name, values in self._columns.items()
        }


def _misfits(values: list[Any], kind: pa.DataType, start: int) -> Iterator[int]:
    """Find the positions of values that the type cannot hold, by halving."""
    try:
        _array(values, kind)
    except _NO_PLACE:
        if len(values) == 1:
            yield start
            return
        half = len(values) // 2
        yield from _misfits(values[:half], kind, start)
        yield from _misfits(values[half:], kind, start + half)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    offsets, parts, end = [], [], 0
    for part in values:
        offsets.append(None if part is None else end)
        if part is not None:
            parts.append(part)
            end += len(part)
    offsets.append(end)
    flat = pa.concat_arrays(parts) if parts else pa.array([], kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, type=kind)
