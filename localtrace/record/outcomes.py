"""Outcomes: values that arrive for trajectories after the rollout, alone or in batches."""

from __future__ import annotations

import time
from collections import Counter
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
        ids = [trace_id_of(text_of(one)) for one in (rows_of(trace_ids) if batch else [trace_ids])]
        if batch:
            values = {
                name: value for name, value in values.items() if _fits(recorder, value, len(ids))
            }
        head = (recorder.values.as_int(step), time.time_ns(), recorder.values.as_text(source))
        for places in _apart(ids):
            encoded = {
                str(recorder.values.as_text(name)): msgspec.Raw(
                    recorder.values.encode(
                        value
                        if len(places) == len(ids)
                        else [rows_of(value)[place] for place in places]
                    )
                )
                for name, value in values.items()
            }
            named = [ids[place] for place in places]
            record = _encode((int(Kind.OUTCOME), named, batch, *head, encoded))
            recorder.put(Item(Kind.OUTCOME, b"", record))
    except Exception:
        recorder.losses.unusable()


def _apart(ids: Sequence[str]) -> list[Sequence[int]]:
    """Part the places of ids so that none is named twice in a part: the later record wins."""
    if len(set(ids)) == len(ids):
        return [range(len(ids))]
    parts: list[list[int]] = []
    times: Counter[str] = Counter()
    for place, trace_id in enumerate(ids):
        if times[trace_id] == len(parts):
            parts.append([])
        parts[times[trace_id]].append(place)
        times[trace_id] += 1
    return list(parts)


def _fits(recorder: Recorder, value: Any, count: int) -> bool:
    """Return whether a value has an item per trajectory; count the trajectories if not."""
    if row_count(value) == count:
        return True
    recorder.losses.record("bad_argument", count)
    return False
