"""Imported rollouts, and the journal records that they become.

The records are built here and not by `record/capture.py`, which takes its own times: those of an
import come from its source. A trajectory has an end record only, written after its calls. An import
that is killed in between leaves calls, which the next import knows, but no unfinished trajectory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from localtrace.field_names import MESSAGE_NAMES, PROMPT_NAMES
from localtrace.record.capture import encode_inputs
from localtrace.record.recorder import Recorder
from localtrace.store.journal.records import (
    STATUSES,
    Begin,
    End,
    Head,
    Kind,
    OutcomeRecord,
    SpanCall,
    TurnCall,
)
from localtrace.store.journal.turns import TurnTotals
from localtrace.store.journal.writer import Item
from localtrace.store.whole_prompts import shared_prefix
from localtrace.values.codec import encode
from localtrace.values.encoded import raw_map

REPEATED_MAX_BYTES = 4 * 2**30
"""Largest size of the messages of all turns of a rollout, each with those before it."""
MESSAGE_BYTES = 256
"""The memory of a message besides its text, at least."""
_encode = msgspec.msgpack.Encoder().encode
_DECODER = msgspec.msgpack.Decoder(SpanCall | TurnCall)


@dataclass(frozen=True, slots=True)
class CallIn:
    """One call of an imported trajectory."""

    span_id: int
    op: str
    start_ns: int
    duration_ns: int
    inputs: dict[str, Any]
    outputs: Any
    status: str = "ok"
    error: str | None = None
    parent_id: int | None = None
    seq: int = 0
    is_detail: bool = False
    """Whether its caller is the record of the same generation."""
    takes_prompt: bool = True
    """Whether its inputs may hold a prompt or messages."""
    kind: str | None = None
    """One of KINDS, where the source says it."""


@dataclass(frozen=True, slots=True)
class OutcomeIn:
    """A value that arrived for an imported trajectory."""

    name: str
    value: Any
    """A number, text, or one number per token."""
    time_ns: int
    step: int | None = None
    source: str | None = None

    @property
    def key(self) -> tuple[str, int, str | None, str]:
        """The fields that tell the outcomes of a trajectory apart."""
        text = self.value if isinstance(self.value, str) else ""
        return self.name, self.time_ns, self.source, text


@dataclass(frozen=True, slots=True)
class Rollout:
    """An imported trajectory, or imported calls of a trajectory that was recorded elsewhere."""

    trace_id: str
    calls: tuple[CallIn, ...]
    start_ns: int
    duration_ns: int = 0
    step: int | None = None
    sample_index: str | None = None
    rollout_n: int | None = None
    group_id: str | None = None
    validate: bool = False
    name: str | None = None
    agent: str | None = None
    data_source: str | None = None
    status: str = "ok"
    error: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    """`reward`, and values that become attributes."""
    outcomes: tuple[OutcomeIn, ...] = ()
    is_carried: bool = False
    """Whether another process records the trajectory itself."""
    is_export: bool = False
    """Whether localtrace exported it, so that a store which has its row has all of it."""
    size_bytes: int = 0
    """Bytes of the source that were read for it."""


class SharedPrompts:
    """The prompts of one trajectory, of which each turn repeats those before as the same objects.

    Read anew for every turn, they would take memory that grows with the square of the turns.
    """

    def __init__(self) -> None:
        self._messages: dict[bytes, Any] = {}
        self._ids: list[int] = []
        """The newest prompt of token ids."""

    def shared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return equal inputs of a call, which share messages and ids with earlier calls."""
        shared = dict(inputs)
        for name in MESSAGE_NAMES:
            if isinstance(messages := inputs.get(name), list):
                shared[name] = [self._messages.setdefault(encode(one), one) for one in messages]
        for name in PROMPT_NAMES:
            if isinstance(ids := inputs.get(name), list) and set(map(type, ids)) == {int}:
                same = shared_prefix(ids, self._ids)
                self._ids = shared[name] = self._ids[:same] + ids[same:]
        return shared


def digest_id(size_bytes: int, *parts: str | bytes) -> bytes:
    """Return an id of `size_bytes` bytes that equal parts always give again."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()[:size_bytes]


def derived_span_id(*parts: str | bytes) -> int:
    """Return the id of a span that equal parts always give again."""
    return int.from_bytes(digest_id(8, *parts), "big")


def folder_run_id(prefix: str, paths: Iterable[Path]) -> str:
    """Return the run id for the first path's folder; the same folder always gives the same id."""
    first = next(iter(paths)).resolve()
    folder = first if first.is_dir() else first.parent
    return f"{prefix}-{digest_id(6, str(folder)).hex()}"


def call_item(recorder: Recorder, rollout: Rollout, call: CallIn) -> Item:
    """Return the record of one call."""
    kind, shape = (Kind.TURN, TurnCall) if call.takes_prompt else (Kind.SPAN, SpanCall)
    record = shape(
        head=_head(recorder, rollout),
        span_id=call.span_id,
        parent_id=call.parent_id,
        seq=call.seq,
        op=_text(recorder, call.op),
        start_ns=call.start_ns,
        duration_ns=call.duration_ns,
        status=STATUSES.index(call.status),
        error=recorder.values.as_text(call.error),
        inputs=raw_map(encode_inputs(recorder, call.inputs)) or {},
        outputs=msgspec.Raw(_outputs(recorder, call.outputs)),
        kind=call.kind,
        detail=call.is_detail,
    )
    return Item(kind, _key(rollout), _encode(record), counted=rollout.is_carried)


def turn_totals(recorder: Recorder, rollout: Rollout) -> TurnTotals:
    """Count the turns of a trajectory, as the writer does where it is given all calls."""
    totals = TurnTotals()
    for call in rollout.calls:
        totals.count(_DECODER.decode(call_item(recorder, rollout, call).record))
    return totals


def end_item(recorder: Recorder, rollout: Rollout, totals: TurnTotals | None = None) -> Item:
    """Return the end record of a trajectory.

    Args:
        totals: its turns, where the writer is not given all calls and cannot count them.
    """
    totals = totals or TurnTotals()
    begin = Begin(
        head=_head(recorder, rollout),
        start_ns=rollout.start_ns,
        group_id=recorder.values.as_text(rollout.group_id),
        validate=rollout.validate,
        name=recorder.values.as_text(rollout.name),
        agent=recorder.values.as_text(rollout.agent),
        data_source=recorder.values.as_text(rollout.data_source),
        prompt_hash=totals.prompt_hash,
    )
    values = {
        _text(recorder, name): msgspec.Raw(recorder.values.encode(value))
        for name, value in rollout.values.items()
    }
    end = End(
        begin=begin,
        duration_ns=rollout.duration_ns,
        status=STATUSES.index(rollout.status),
        error=recorder.values.as_text(rollout.error),
        values=msgspec.Raw(_encode(values)),
        span_count=len(rollout.calls),
        turn_count=totals.turns,
        output_tokens=totals.output_tokens,
    )
    return Item(Kind.END, _key(rollout), _encode(end))


def outcome_item(recorder: Recorder, rollout: Rollout, outcome: OutcomeIn) -> Item:
    """Return the record of one outcome."""
    record = OutcomeRecord(
        trace_ids=[rollout.trace_id],
        batch=False,
        step=recorder.values.as_int(outcome.step),
        time_ns=outcome.time_ns,
        source=recorder.values.as_text(outcome.source),
        values={_text(recorder, outcome.name): msgspec.Raw(recorder.values.encode(outcome.value))},
    )
    return Item(Kind.OUTCOME, b"", _encode(record))


def _key(rollout: Rollout) -> bytes:
    return bytes.fromhex(rollout.trace_id)


def _head(recorder: Recorder, rollout: Rollout) -> Head:
    return Head(
        _key(rollout),
        recorder.values.as_int(rollout.step),
        recorder.values.as_text(rollout.sample_index),
        recorder.values.as_int(rollout.rollout_n),
    )


def _text(recorder: Recorder, text: str) -> str:
    return recorder.values.as_text(text) or ""


def _outputs(recorder: Recorder, outputs: Any) -> bytes:
    data = recorder.values.encode(outputs)
    if len(data) > recorder.settings.record_max_bytes:
        data = recorder.values.too_large(outputs, len(data))
    return data
