"""From the record of a call to its row: token lists move into columns, the rest becomes JSON."""

from __future__ import annotations

from array import array
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
    WEIGHT_NAMES,
    WEIGHT_RANGE_NAMES,
)
from localtrace.store.deltas import DeltaReader
from localtrace.store.encoded import first_named, raw_map
from localtrace.store.records import KINDS, STATUSES, Call, Delta, Head, SpanCall, TurnCall
from localtrace.store.tokenizers import Decode
from localtrace.store.turns import Fields, generated_text, is_turn, named_value, with_details
from localtrace.store.values import as_list

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class SpanReader:
    """Makes the rows of one journal's calls, fed in order."""

    def __init__(self, decode: Decode) -> None:
        self.lost_prompts = 0
        """Prompts and message lists whose base is lost."""
        self._decode = decode
        self._deltas = DeltaReader()
        self._not_in_columns: set[tuple[bytes, int | None]] = set()
        """Turns whose prompt or output later turns cannot continue by columns."""

    def row(self, call: SpanCall | TurnCall, run_id: str) -> dict[str, Any]:
        """Columns of a call that follow from its record."""
        row = {
            **head_columns(call.head),
            "span_id": f"{call.span_id:016x}",
            "parent_id": None if call.parent_id is None else f"{call.parent_id:016x}",
            "seq": call.seq,
            "op": call.op,
            "status": STATUSES[call.status],
            "error": call.error,
            "start_ns": call.start_ns,
            "end_ns": call.start_ns + call.duration_ns,
            "started_at": started_at(call.start_ns),
            "kind": call.kind if call.kind in KINDS else None,
            "has_turns": call.has_turns or None,
        }
        outputs = raw_map(call.outputs)
        row["is_turn"] = is_turn(call, outputs)
        ids = self._result(call, outputs, row)
        new_ids = self._arguments(call, row)
        row["output_text"] = self._decode(run_id, ids) if ids else None
        if row["is_turn"] and outputs and ids is None:
            row["output_text"] = _text(generated_text(outputs))
        row["prompt_text"] = self._decode(run_id, new_ids) if new_ids else None
        return row

    def _result(self, call: Call, fields: Fields | None, row: dict[str, Any]) -> list[int] | None:
        """Move the result's token lists into columns; returns the generated ids."""
        if fields is None:
            row["outputs"] = codec.msgpack_to_json(call.outputs)
            return None
        ids = _take(fields, OUTPUT_NAMES, row, "output_name", "output_ids", pa.int32())
        if ids is not None:
            _take(fields, LOGPROB_NAMES, row, "logprobs_name", "output_logprobs", pa.float32())
            _take(fields, MASK_NAMES, row, "mask_name", "response_mask", pa.int8())
        known = with_details(fields)
        row["finish_reason"] = _text(named_value(known, FINISH_NAMES))
        row["weight_version"] = _text(_weights(known))
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
                self.lost_prompts += 1
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


def head_columns(head: Head) -> dict[str, Any]:
    """The columns that every record of a trajectory has."""
    return {
        "trace_id": head.trace_id.hex(),
        "step": head.step,
        "sample_index": head.sample_index,
        "rollout_n": head.rollout_n,
    }


def started_at(start_ns: int) -> datetime | None:
    """A time as a date; None where it is out of the range of dates."""
    try:
        return _EPOCH + timedelta(microseconds=start_ns // 1000)
    except OverflowError:
        return None


def valid_text(value: str) -> str:
    """Without lone surrogates, which no column of text can hold."""
    return value.encode("utf-8", "replace").decode()


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
    values = as_list(codec.decode(fields[name]))
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


def _weights(known: Fields) -> Any:
    """The version of the weights that generated, or the first and the last where it changed."""
    first, last = (named_value(known, (name,)) for name in WEIGHT_RANGE_NAMES)
    if None not in (first, last) and first != last:
        return f"{first}..{last}"
    return named_value(known, WEIGHT_NAMES)


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return valid_text(value) if isinstance(value, str) else codec.to_json(value)
