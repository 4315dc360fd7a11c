"""The context variable that tells which trajectory and which span the running code is in."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Self

import msgspec

from localtrace.store.journal.records import Kind

_encode = msgspec.msgpack.Encoder().encode


class TrajectoryState:
    """The state of an open trajectory in the recording process, shared by all its spans."""

    __slots__ = (
        "begin", "begin_mono_ns", "dropped", "ended", "head", "key", "next_seq", "owner", "step",
        "values",
    )  # fmt: skip

    def __init__(self, key: bytes, step: int | None, head: msgspec.Raw) -> None:
        self.key = key
        """The trace id as 16 bytes."""
        self.step = step
        self.head = head
        """The fields that every record of the trajectory carries, encoded once."""
        self.begin = msgspec.Raw()
        """The encoded begin record, which the end record repeats."""
        self.begin_mono_ns = 0
        self.owner: object = None
        """The `identity` of the recorder: a forked child must not end its parent's trajectory."""
        self.next_seq = 0
        """Number of the next span, in the order in which spans begin."""
        self.dropped: str | None = None
        """Why the trajectory is no longer recorded; None while it is."""
        self.ended = False
        self.values: dict[str, msgspec.Raw] = {}
        """Values noted by `trajectory.set`, encoded."""

    def end_record(
        self, ended_mono_ns: int, status: int, error: str | None, values: Mapping[str, msgspec.Raw]
    ) -> bytes:
        """Return the encoded record of the trajectory's end."""
        duration_ns = ended_mono_ns - self.begin_mono_ns
        return _encode(
            (int(Kind.END), self.begin, duration_ns, status, error, values, self.next_seq)
        )


class Scope:
    """The place under which new spans hang: a trajectory, and the span that encloses them."""

    __slots__ = ("span_id", "trajectory")

    def __init__(self, trajectory: TrajectoryState, span_id: int | None) -> None:
        self.trajectory = trajectory
        self.span_id = span_id


current: ContextVar[Scope | None] = ContextVar("localtrace_scope", default=None)


class unrecorded:
    """A with block in which nothing is recorded, for rollouts that a sample leaves out."""

    def __enter__(self) -> Self:
        state = TrajectoryState(b"", None, msgspec.Raw())
        state.dropped = "unrecorded"
        self._outer = current.get()
        current.set(Scope(state, None))
        return self

    def __exit__(self, *_: object) -> None:
        current.set(self._outer)
