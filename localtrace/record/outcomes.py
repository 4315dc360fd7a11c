"""Outcomes: values that arrive for trajectories after the rollout, alone or in batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from localtrace.record.propagation import trace_id_of
from localtrace.record.record_values import text_of
from localtrace.record.recorder import Recorder
from localtrace.store.journal.records import Kind
from localtrace.store.journal.writer import Item
from localtrace.values.kinds import is_kind
from localtrace.values.objects import row_count, rows_of

_encode = msgspec.msgpack.Encoder().encode


def record_outcomes(
    recorder: Recorder,
    trace_ids: str | Sequence[str],
    step: int | None,
    source: str | None,
    values: dict[str, Any],
) -> None:
    """Hand over one outcome record. Never raises; values that cannot be used are counted.

    Args:
        trace_ids: one trace id, or many; then each value holds one item per trajectory. Request ids
            of an engine are accepted too.
        step: step of the trajectories; None where it differs or is unknown.
        source: where the values come from.
        values: by name: a number, text, or a list with one number per token.
    """
    try:
        batch = not is_kind(type(trace_ids), str)
        rows = rows_of(trace_ids) if batch else [trace_ids]
        # Of the rows of one trajectory the last one counts.
        places = {trace_id_of(text_of(trace_id)): place for place, trace_id in enumerate(rows)}
        encoded = {}
        for name, value in values.items():
            if batch and row_count(value) != len(rows):
                recorder.losses.record("bad_argument", len(rows))
                continue
            if len(places) < len(rows):
                value = [rows_of(value)[place] for place in places.values()]
            key = str(recorder.values.as_text(name))
            encoded[key] = msgspec.Raw(recorder.values.encode(value))
        head = (recorder.values.as_int(step), time.time_ns(), recorder.values.as_text(source))
        record = _encode((int(Kind.OUTCOME), list(places), batch, *head, encoded))
        recorder.put(Item(Kind.OUTCOME, b"", record))
    except Exception:
        recorder.losses.unusable()
