"""From the records of journals to the rows of tables; the same for sealing and for live reading."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pyarrow as pa

from localtrace import codec
from localtrace.schema import (
    FINISH_NAMES,
    LOGPROB_NAMES,
    MASK_NAMES,
    MESSAGE_NAMES,
    OUTPUT_NAMES,
    TABLES,
    WEIGHT_NAMES,
    TableSchema,
)
from localtrace.store.deltas import DeltaReader, first_named, raw_map
from localtrace.store.journal import Frames, JournalStatus
from localtrace.store.records import (
    STATUSES,
    Begin,
    Call,
    Closed,
    Delta,
    End,
    Envelope,
    Head,
    MetricsRecord,
    Opened,
    OutcomeRecord,
    RunRecord,
    TurnCall,
    decode_envelope,
)
from localtrace.store.tokenizers import Decode

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Columns:
    """The growing columns of one table."""

    def __init__(self, schema: TableSchema) -> None:
        self._schema = schema
        self._columns: dict[str, list[Any]] = {name: [] for name in schema.column_names}
        self.count = 0

    def add(self, row: dict[str, Any]) -> None:
        """Append one row; names that it lacks become null."""
        for name, column in self._columns.items():
            column.append(row.get(name))
        self.count += 1

    def table(self) -> pa.Table:
        """Everything so far, sorted, in the schema's types."""
        schema = self._schema.arrow()
        arrays = [_array(self._columns[field.name], field.type) for field in schema]
        table = pa.table(arrays, schema=schema)
        return table.sort_by([(name, "ascending") for name in self._schema.sort_by])


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


@dataclass(slots=True)
class Damage:
    """What could not be read, in numbers."""

    records: int = 0
    """Places in journals where one or more frames are unreadable."""
    torn_tails: int = 0
    """Unfinished last frames: a process died while it wrote."""
    prompts: int = 0
    """Prompts and message lists whose base is lost; the turn's own ids remain."""

    def add(self, other: Damage) -> None:
        """Add up."""
        self.records += other.records
        self.torn_tails += other.torn_tails
        self.prompts += other.prompts


class JournalRows:
    """Collects the rows of any number of journals."""

    def __init__(self, decode: Decode | None = None) -> None:
        self.columns = {name: Columns(schema) for name, schema in TABLES.items()}
        self.damage = Damage()
        self.decode = decode or (lambda run_id, ids: None)

    def add_journal(self, frames: Frames, status: JournalStatus) -> bool:
        """Add one journal; False when a part of it cannot be read.

        Its status says what became of trajectories that have no end there.
        """
        damaged_before = self.damage.records
        self.damage.records += len(frames.damaged)
        if status is not JournalStatus.LIVE:  # else the writer is in the middle of its last frame
            self.damage.torn_tails += frames.tail_start is not None
        reader = _JournalReader(self)
        for payload in frames.payloads:
            try:
                reader.add(decode_envelope(payload))
            except Exception:
                # It passed its checksum, yet is not what we write; the others must stay readable.
                self.damage.records += 1
        if status is JournalStatus.LAST or reader.closed:
            reader.end_open("interrupted")
        elif status is JournalStatus.LIVE:
            reader.end_open("running")
        return self.damage.records == damaged_before

    def tables(self) -> dict[str, pa.Table]:
        """Sorted rows by table; every table has an entry."""
        return {name: columns.table() for name, columns in self.columns.items()}


class _JournalReader:
    """The state of reading one journal from its first record to its last."""

    def __init__(self, rows: JournalRows) -> None:
        self._rows = rows
        self._deltas = DeltaReader()
        self._open: dict[bytes, tuple[dict[str, Any], Begin]] = {}
        self._opened: dict[str, Any] = {}
        self._not_in_columns: set[tuple[bytes, int | None]] = set()
        """Turns whose prompt or output later turns cannot continue by columns."""
        self.closed = False

    def add(self, envelope: Envelope) -> None:
        record = envelope.record
        common = {
            **self._opened,
            **msgspec.structs.asdict(envelope.context),
            "writer_seq": envelope.seq,
        }
        columns = self._rows.columns
        if isinstance(record, Call):
            columns["spans"].add(common | self._span(record, envelope.context.run_id))
        elif isinstance(record, Begin):
            self._open[record.head.trace_id] = (common, record)
        elif isinstance(record, End):
            self._open.pop(record.begin.head.trace_id, None)
            columns["trajectories"].add(common | _trajectory(record))
        elif isinstance(record, OutcomeRecord):
            for row in _outcomes(record):
                columns["outcomes"].add(common | row)
        elif isinstance(record, MetricsRecord):
            for name, value in record.values.items():
                row = {"step": record.step, "name": name, "value": value, "time_ns": record.time_ns}
                columns["metrics"].add(common | row)
        elif isinstance(record, RunRecord):
            columns["runs"].add(common | _run(record))
        elif isinstance(record, Opened):
            self._opened = {"writer_id": record.writer_id, "host": record.host, "pid": record.pid}
        elif isinstance(record, Closed):
            self.closed = True

    def end_open(self, status: str) -> None:
        """Give a row to every trajectory that has begun and not ended."""
        for common, begin in self._open.values():
            end = End(begin, 0, STATUSES.index(status), None, msgspec.Raw(b"\x80"), 0)
            row = _trajectory(end) | {"end_ns": None, "span_count": None, "turn_count": None}
            row["output_tokens"] = None
            self._rows.columns["trajectories"].add(common | row)

    def _span(self, call: Call, run_id: str) -> dict[str, Any]:
        row = {
            **_keys(call.head),
            "span_id": f"{call.span_id:016x}",
            "parent_id": None if call.parent_id is None else f"{call.parent_id:016x}",
            "seq": call.seq,
            "op": call.op,
            "status": STATUSES[call.status],
            "error": call.error,
            "start_ns": call.start_ns,
            "end_ns": call.start_ns + call.duration_ns,
            "started_at": _started_at(call.start_ns),
            "is_turn": False,
        }
        ids = self._result(call, row)
        new_ids = self._arguments(call, row)
        finished = ids is not None or row["finish_reason"] is not None
        row["is_turn"] = isinstance(call, TurnCall) and finished
        row["output_text"] = self._rows.decode(run_id, ids) if ids else None
        row["prompt_text"] = self._rows.decode(run_id, new_ids) if new_ids else None
        return row

    def _result(self, call: Call, row: dict[str, Any]) -> list[int] | None:
        """Move the result's token lists into columns; returns the generated ids."""
        row["finish_reason"] = None
        fields = raw_map(call.outputs)
        if fields is None:
            row["outputs"] = codec.msgpack_to_json(call.outputs)
            return None
        ids = _take(fields, OUTPUT_NAMES, row, "output_name", "output_ids", pa.int32())
        if ids is not None:
            _take(fields, LOGPROB_NAMES, row, "logprobs_name", "output_logprobs", pa.float32())
            _take(fields, MASK_NAMES, row, "mask_name", "response_mask", pa.int8())
        row["finish_reason"] = _text_field(fields, FINISH_NAMES)
        row["weight_version"] = _text_field(fields, WEIGHT_NAMES)
        row["outputs"] = codec.msgpack_to_json(msgspec.msgpack.encode(fields))
        return ids

    def _arguments(self, call: Call, row: dict[str, Any]) -> list[int] | None:
        """Move prompt and messages into columns; returns the prompt's new ids."""
        fields = raw_map(call.inputs) or {}
        lengths = self._deltas.add(call)
        new_ids = None
        for delta in call.deltas:
            fields.pop(delta.name, None)
            length = lengths[delta.name]
            if length is None:
                self._rows.damage.prompts += 1
                row["placeholder"] = f"{delta.name}: the turn that it continues is lost"
            base = None if delta.base is None else f"{delta.base:016x}"
            shape = {"name": delta.name, "base": base, "kept": delta.kept, "crc32": delta.crc32}
            if delta.name in MESSAGE_NAMES:
                row |= {f"messages_{key}": value for key, value in shape.items()}
                row["messages"] = codec.msgpack_to_json(delta.new)
                continue
            new_ids, column = _integers(codec.decode(delta.new))
            if length is not None and not self._fits_columns(call, delta, column, row):
                fields[delta.name] = self._whole(call, delta.name)
                continue
            row |= {f"prompt_{key}": value for key, value in shape.items()}
            row |= {"prompt_ids": column, "prompt_tokens": length}
        inputs = msgspec.msgpack.encode(fields) if fields or call.deltas else call.inputs
        row["inputs"] = codec.msgpack_to_json(inputs)
        return new_ids

    def _fits_columns(
        self, call: Call, delta: Delta, column: pa.Array | None, row: dict[str, Any]
    ) -> bool:
        """Whether the prompt can be rebuilt from columns alone; else it stays in the inputs."""
        trace_id = call.head.trace_id
        fits = column is not None and (trace_id, delta.base) not in self._not_in_columns
        has_output = first_named(raw_map(call.outputs), OUTPUT_NAMES) is not None
        if not fits or (has_output and row.get("output_name") is None):
            self._not_in_columns.add((trace_id, call.span_id))
        return fits

    def _whole(self, call: Call, name: str) -> msgspec.Raw:
        whole = self._deltas.whole(call.head.trace_id, call.span_id, name)
        return msgspec.Raw(whole if whole is not None else b"\xc0")


def _keys(head: Head) -> dict[str, Any]:
    return {
        "trace_id": head.trace_id.hex(),
        "step": head.step,
        "sample_index": head.sample_index,
        "rollout_n": head.rollout_n,
    }


def _started_at(start_ns: int) -> datetime | None:
    try:
        return _EPOCH + timedelta(microseconds=start_ns // 1000)
    except OverflowError:
        return None


def _trajectory(end: End) -> dict[str, Any]:
    begin = end.begin
    values = raw_map(end.values) or {}
    reward = _number(codec.decode(values["reward"])) if "reward" in values else None
    if reward is not None:
        del values["reward"]
    return {
        **_keys(begin.head),
        "group_id": begin.group_id,
        "validate": begin.validate,
        "name": begin.name,
        "agent": begin.agent,
        "data_source": begin.data_source,
        "status": STATUSES[end.status],
        "error": end.error,
        "start_ns": begin.start_ns,
        "end_ns": begin.start_ns + end.duration_ns,
        "started_at": _started_at(begin.start_ns),
        "reward": reward,
        "span_count": end.span_count,
        "turn_count": end.turn_count,
        "output_tokens": end.output_tokens,
        "attributes": codec.msgpack_to_json(msgspec.msgpack.encode(values)),
    }


def _outcomes(record: OutcomeRecord) -> list[dict[str, Any]]:
    rows = []
    for name, raw in record.values.items():
        value = _as_list(codec.decode(raw))
        in_batch = record.batch and isinstance(value, list)
        items = value if in_batch else [value] * len(record.trace_ids)
        for trace_id, item in zip(record.trace_ids, items, strict=False):
            if item is not None:
                rows.append(
                    {
                        "trace_id": trace_id,
                        "step": record.step,
                        "name": name,
                        "time_ns": record.time_ns,
                        "source": record.source,
                        "folded": False,
                        **_outcome_value(item),
                    }
                )
    return rows


def _as_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _outcome_value(value: Any) -> dict[str, Any]:
    value = _as_list(value)
    if isinstance(value, str):
        return {"text": _valid_text(value)}
    number = _number(value)
    if number is not None:
        return {"number": number}
    if isinstance(value, list):
        numbers = [_number(item) for item in value]
        if None not in numbers:
            return {"values": pa.array(numbers, pa.float32())}
    return {"text": codec.to_json(value)}


def _number(value: Any) -> float | None:
    """As a double; None for what is not a number or is too large for one."""
    try:
        return float(value) if isinstance(value, bool | int | float) else None
    except OverflowError:
        return None


def _valid_text(value: str) -> str:
    """Without lone surrogates, which no column of text can hold."""
    return value.encode("utf-8", "replace").decode()


def _run(record: RunRecord) -> dict[str, Any]:
    facts = {name: codec.decode(raw) for name, raw in record.facts.items()}
    for name, value in facts.items():
        if name in ("config", "versions", "losses") and value is not None:
            facts[name] = codec.to_json(value)
        elif isinstance(value, str):
            facts[name] = _valid_text(value)
    return {**facts, "event": record.event, "time_ns": record.time_ns}


def _take(
    fields: dict[str, msgspec.Raw],
    names: tuple[str, ...],
    row: dict[str, Any],
    name_column: str,
    column: str,
    kind: pa.DataType,
) -> list[Any] | None:
    """Move a list of numbers from a result into a column, if that loses nothing.

    A list that the column's type would round is kept in both places.
    """
    name = first_named(fields, names)
    if name is None:
        return None
    values = _as_list(codec.decode(fields[name]))
    narrow = _narrow(values, kind)
    if narrow is None:
        return None
    row[column] = narrow
    if kind != pa.float32() or array("f", values).tolist() == values:
        row[name_column] = name
        del fields[name]
    return list(values)


def _integers(values: Any) -> tuple[list[int] | None, pa.Array | None]:
    column = _narrow(values, pa.int32())
    return (None, None) if column is None else (values, column)


def _narrow(values: Any, kind: pa.DataType) -> pa.Array | None:
    wanted = {float} if kind == pa.float32() else {int}
    if not isinstance(values, list) or not set(map(type, values)) <= wanted:
        return None
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, OverflowError):
        return None


def _text_field(fields: dict[str, msgspec.Raw], names: tuple[str, ...]) -> str | None:
    name = first_named(fields, names)
    if name is None:
        return None
    value = codec.decode(fields[name])
    if value is None:
        return None
    return _valid_text(value) if isinstance(value, str) else codec.to_json(value)
