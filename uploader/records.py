"""Read and map: trajectories of a store as records of a target, one bad one at most lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from localtrace.types import Trajectory
from localtrace.uploader.selection import Choice
from localtrace.uploader.targets import Place, Record, Target

if TYPE_CHECKING:
    from localtrace.reader import Store

READ_BATCH = 16
"""Trajectories in memory at once; each may hold megabytes of prompts."""

NOT_IN_STORE = "not in the store"

OnReject: TypeAlias = Callable[[str, str], None]
"""Called with a trace id and the reason why it cannot be uploaded."""


def records(
    store: Store, target: Target, trace_ids: list[str], place: Place, on_reject: OnReject
) -> Iterator[Record]:
    """Yield the record of each trajectory; those that have none go to `on_reject`."""
    for start in range(0, len(trace_ids), READ_BATCH):
        for trajectory in _read(store, trace_ids[start : start + READ_BATCH], on_reject):
            record = _encode(target, trajectory, place, on_reject)
            if record is not None:
                yield record


def _read(store: Store, trace_ids: list[str], on_reject: OnReject) -> Iterator[Trajectory]:
    waiting = dict.fromkeys(trace_ids)
    with suppress(Exception):
        for trajectory in store.read(trace_ids, batch_size=READ_BATCH):
            del waiting[trajectory.trace_id]
            yield trajectory
    # Usually none is left. After a failure each is asked for alone, so that only one is lost.
    for trace_id in waiting:
        try:
            trajectory = store.trajectory(trace_id)
        except Exception as error:
            on_reject(trace_id, f"cannot be read: {error}")
        else:
            yield trajectory


def _encode(
    target: Target, trajectory: Trajectory, place: Place, on_reject: OnReject
) -> Record | None:
    try:
        record = target.encode(trajectory, place)
    except Exception as error:
        # Recorded values are hostile input; whatever they do to the encoder stays with this one.
        on_reject(trajectory.trace_id, f"cannot be encoded: {type(error).__name__}: {error}")
        return None
    if record.size_bytes > target.record_max_bytes:
        on_reject(
            trajectory.trace_id,
            f"too large: {record.size_bytes} bytes, at most {target.record_max_bytes} are sent",
        )
        return None
    return record


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an upload of a selection would send."""

    target: str
    """Where to, without secrets."""
    selected: int
    size_bytes: int
    rejected: dict[str, str]
    """By trace id the reason why it would not be sent."""


def measure(store: Store, target: Target, choice: Choice) -> Estimate:
    """Build every record of a choice and count its bytes."""
    rejected = dict.fromkeys(choice.unknown, NOT_IN_STORE)
    nowhere = Place("", "", "")
    found = records(store, target, choice.trace_ids, nowhere, rejected.__setitem__)
    size_bytes = sum(record.size_bytes for record in found)
    selected = len(choice.trace_ids) + len(choice.unknown)
    return Estimate(target.uri, selected, size_bytes, rejected)
