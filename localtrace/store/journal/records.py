"""The records of a journal, as MessagePack arrays whose first element is the kind.

Every frame of a journal holds one `Envelope`. The recording side writes these shapes as plain
tuples, because building them must cost next to nothing; this module is what reads them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any

import msgspec


class Kind(IntEnum):
    """First element of every record."""

    OPENED = 0
    BEGIN = 1
    SPAN = 2
    TURN = 3
    """A span whose arguments may hold a prompt or messages."""
    END = 4
    OUTCOME = 5
    METRICS = 6
    RUN = 7
    CLOSED = 9


STATUSES = ("ok", "error", "cancelled", "interrupted", "dropped", "running")
"""Status codes of spans and trajectories by position."""


class Context(msgspec.Struct, array_like=True, frozen=True):
    """The run that a record belongs to."""

    project: str
    experiment: str
    run_id: str
    attempt: int


class Head(msgspec.Struct, array_like=True, frozen=True):
    """The trajectory that a record belongs to."""

    trace_id: bytes
    step: int | None = None
    sample_index: str | None = None
    rollout_n: int | None = None


class Opened(msgspec.Struct, array_like=True, tag=int(Kind.OPENED)):
    """First record of a journal."""

    format_version: int
    writer_id: str
    number: int
    host: str
    pid: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """Checked here: it stands in every row of the journal, and a bad one would lose them all."""
    time_ns: int


class Begin(msgspec.Struct, array_like=True, tag=int(Kind.BEGIN)):
    """A trajectory began; repeated at the start of every later journal while it is open."""

    head: Head
    start_ns: int
    group_id: str | None
    validate: bool
    name: str | None
    agent: str | None
    data_source: str | None
    prompt_hash: bytes | None = None
    """Identity of the first turn's prompt, once the writer has seen it."""


class Delta(msgspec.Struct, array_like=True):
    """A list argument stored as what it adds to an earlier one."""

    name: str
    """Name of the argument."""
    base: int | None
    """Span id of the earlier turn; null: `new` is the whole list."""
    kept: int
    """Number of leading elements that are the base's."""
    new: msgspec.Raw
    """The list of the other elements."""
    crc32: int
    """Checksum of the whole list's MessagePack elements."""


KINDS = ("generation", "tool", "reward", "agent", "other")
"""Kinds of calls."""


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """The end of a call or a trajectory that failed or was dropped."""

    error: str
    """Type and message of the exception, or the reason of a drop."""
    traceback: str | None = None
    """Where it was raised, in Python's format without the last line, which is the error."""


class Call(msgspec.Struct, array_like=True):
    """One finished call."""

    head: Head
    span_id: int
    parent_id: int | None
    seq: int
    op: str
    start_ns: int
    duration_ns: int
    status: int
    failure: Failure | None
    inputs: dict[str, msgspec.Raw]
    """The arguments by name; those that became deltas are null."""
    outputs: msgspec.Raw
    deltas: list[Delta] = []
    kind: str | None = None
    """One of KINDS, where the recording code says it."""
    is_async: bool | None = None
    """Whether a coroutine function was called, where the recording code says it."""
    is_stream: bool = False
    """True where a generator was called, whose result is the list of what it yielded."""
    detail: bool = False
    """True where the call is not counted as a turn: its caller recorded the same generation, the
    turns are inside it, or it is a part of a tool or of scoring."""
    has_turns: bool = False
    """True where turns were made inside it, in the same process."""
    turns: int = 0
    """Number of generations that it made."""
    prompt_hash: bytes | None = None
    """Identity of the prompt, where this is the first turn of its trajectory."""


class SpanCall(Call, array_like=True, tag=int(Kind.SPAN)):
    """One finished call whose arguments hold no prompt."""


class TurnCall(Call, array_like=True, tag=int(Kind.TURN)):
    """One finished call whose arguments may hold a prompt or messages."""


class End(msgspec.Struct, array_like=True, tag=int(Kind.END)):
    """A trajectory ended; holds all of its row, so that an earlier journal is not needed."""

    begin: Begin
    duration_ns: int
    status: int
    failure: Failure | None
    values: msgspec.Raw
    """Values given to `set`, by name."""
    span_count: int
    turn_count: int = 0
    output_tokens: int | None = 0


class OutcomeRecord(msgspec.Struct, array_like=True, tag=int(Kind.OUTCOME)):
    """Values for one or many trajectories."""

    trace_ids: list[str]
    batch: bool
    """True: each value is a list with one item per trajectory."""
    step: int | None
    time_ns: int
    source: str | None
    values: dict[str, msgspec.Raw]


class MetricsRecord(msgspec.Struct, array_like=True, tag=int(Kind.METRICS)):
    """Scalars of a training step."""

    step: int | None
    time_ns: int
    values: dict[str, Any]


class RunRecord(msgspec.Struct, array_like=True, tag=int(Kind.RUN)):
    """A process began to record, or stopped."""

    event: str
    time_ns: int
    facts: dict[str, msgspec.Raw]


class Closed(msgspec.Struct, array_like=True, tag=int(Kind.CLOSED)):
    """Last record of a writer that closed in good order."""

    time_ns: int


Record = (
    Opened | Begin | SpanCall | TurnCall | End | OutcomeRecord | MetricsRecord | RunRecord | Closed
)


class Envelope(msgspec.Struct, array_like=True):
    """One frame: the run, the record's number within its writer, the record."""

    context: Context
    seq: int
    record: Record


def encode_context(context: Context) -> bytes:
    """Return the bytes by which the frames of a journal name their run."""
    return msgspec.msgpack.encode(context)


def decode_envelope(payload: bytes | memoryview) -> Envelope:
    """Read one frame.

    Raises:
        msgspec.MsgspecError: the payload is not an envelope of this format.
    """
    return _DECODER.decode(payload)


def call_trace_id(payload: bytes | memoryview, context: bytes) -> bytes | None:
    """Return the trace id of a call, from its place in a frame; None for any other record.

    Most of a journal is calls, and to decode one takes as long as all that its lists hold.

    Args:
        payload: the frame.
        context: the encoded context of its journal, which stands before the record.
    """
    at = 1 + len(context)
    head = bytes(payload[: at + _HEAD_BYTES])
    if not head.startswith(context, 1):
        return None
    at += _INT_BYTES.get(head[at : at + 1], 1)  # the number
    at += 3 if head[at : at + 1] == b"\xdc" else 1  # the head of the record's array
    is_call = head[at : at + 1] in _CALLS and head[at + 1 : at + 4] == b"\x94\xc4\x10"
    return head[at + 4 : at + 20] if is_call else None


_DECODER = msgspec.msgpack.Decoder(Envelope)
_INT_BYTES = {b"\xcc": 2, b"\xcd": 3, b"\xce": 5, b"\xcf": 9}
_HEAD_BYTES = 9 + 3 + 4 + 16
"""From the number of a record to the trace id of a call, at most."""
_CALLS = (bytes([Kind.SPAN]), bytes([Kind.TURN]))
