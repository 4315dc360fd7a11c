"""From the record of a call to its row: token lists become columns, the rest becomes JSON."""

from __future__ import annotations

from array import array
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pyarrow as pa

from localtrace.field_names import MESSAGE_NAMES, OUTPUT_NAMES
from localtrace.store.journal.deltas import DeltaReader
from localtrace.store.journal.records import KINDS, STATUSES, Call, Delta, Head, SpanCall, TurnCall
from localtrace.store.journal.results import Fields
from localtrace.store.journal.turns import generations
from localtrace.store.tables.batched import rows_of
from localtrace.store.tables.generated import (
    Row,
    add_generated,
    ids_column,
    take_tokens,
    told_columns,
)
from localtrace.store.tokenizers import Decode
from localtrace.values import codec
from localtrace.values.encoded import first_named, raw_map

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class SpanReader:
    """A maker of rows from the calls of one journal, which are fed in order."""

    def __init__(self, decode: Decode) -> None:
        self.lost_prompts = 0
        """Prompts and message lists whose base is lost."""
        self._decode = decode
        self._deltas = DeltaReader()
        self._not_in_columns: set[tuple[bytes, int | None]] = set()
        """Turns, by trace id and span id, whose prompt or output is not in columns.

        Later prompts cannot refer to these."""

    def rows(self, call: SpanCall | TurnCall, run_id: str) -> list[Row]:
        """Return the row of a call and, if it made several generations, one row for each of them.

        The call's row comes first; with several generations it is not a turn itself.
        """
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
            "is_async": call.is_async,
        }
        inputs = raw_map(call.inputs) or {}
        outputs = raw_map(call.outputs)
        made = generations(call, inputs, outputs)
        is_batch = bool(made) and made[0].index is not None
        row |= {
            "is_turn": bool(made) and not is_batch,
            "batch_size": len(made) if is_batch else None,
        }
        _add_result(call, outputs, row)
        lengths = self._arguments(call, inputs, outputs, row)
        rows = [row, *(rows_of(row, inputs, lengths, made) if is_batch else ())]
        if row["is_turn"]:
            add_generated(made[0].outputs, row)
        for row in rows:
            self._add_texts(run_id, row)
        return rows

    def _add_texts(self, run_id: str, row: Row) -> None:
        """Add the ids as text; without a tokenizer, the text of the result stays."""
        for column, ids in (("prompt_text", "prompt_ids"), ("output_text", "output_ids")):
            known = row.get(ids)
            text = self._decode(run_id, _listed(known)) if known else None
            row[column] = row.get(column) if text is None else text

    def _arguments(
        self, call: Call, inputs: Fields, outputs: Fields | None, row: Row
    ) -> dict[str, int | None]:
        """Move prompt and messages into columns, and return their whole lengths, where known."""
        fields = dict(inputs)
        lengths = self._deltas.add(call, outputs)
        has_output = first_named(outputs, OUTPUT_NAMES) is not None
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
            column = ids_column(delta.new)
            output_fits = row.get("output_name") is not None or not has_output
            if length is not None and not self._fits_columns(call, delta, column, output_fits):
                fields[delta.name] = self._whole(call, delta.name)
                continue
            row |= {f"prompt_{key}": value for key, value in shape.items()}
            row |= {"prompt_ids": column, "prompt_tokens": length}
        left = msgspec.msgpack.encode(fields) if fields or call.deltas else call.inputs
        row["inputs"] = codec.msgpack_to_json(left)
        return lengths

    def _fits_columns(
        self, call: Call, delta: Delta, column: pa.Array | None, output_fits: bool
    ) -> bool:
        """Tell whether columns alone can rebuild the prompt; else it stays in the inputs."""
        trace_id = call.head.trace_id
        fits = column is not None and (trace_id, delta.base) not in self._not_in_columns
        if not (fits and output_fits):
            self._not_in_columns.add((trace_id, call.span_id))
        return fits

    def _whole(self, call: Call, name: str) -> msgspec.Raw:
        whole = self._deltas.whole(call.head.trace_id, call.span_id, name)
        return msgspec.Raw(whole if whole is not None else b"\xc0")


def head_columns(head: Head) -> dict[str, Any]:
    """Return the columns that every record of a trajectory has."""
    return {
        "trace_id": head.trace_id.hex(),
        "step": head.step,
        "sample_index": head.sample_index,
        "rollout_n": head.rollout_n,
    }


def started_at(start_ns: int) -> datetime | None:
    """Turn a time into a date; None where it is out of the range of dates."""
    try:
        return _EPOCH + timedelta(microseconds=start_ns // 1000)
    except OverflowError:
        return None


def _listed(ids: pa.Array) -> list[int]:
    """Return the numbers of a column's list, faster than Arrow does."""
    numbers = array("i", ids.buffers()[1].to_pybytes())
    return numbers[ids.offset : ids.offset + len(ids)].tolist()


def _add_result(call: Call, outputs: Fields | None, row: Row) -> None:
    """Add the result, its token lists in columns."""
    if outputs is None:
        row["outputs"] = codec.msgpack_to_json(call.outputs)
        return
    fields = dict(outputs)
    take_tokens(fields, row)
    row |= told_columns(fields)
    row["outputs"] = codec.msgpack_to_json(msgspec.msgpack.encode(fields))
