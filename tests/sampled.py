"""Trajectories in groups, and which of them kept their spans."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import localtrace
from localtrace.field_names import SAMPLED_OUT
from localtrace.store.journal.frames import read_frames
from localtrace.store.journal.journal_files import JournalStatus, list_journals, read_journal
from localtrace.store.journal.records import Begin, Opened, decode_envelope
from localtrace.values.codec import from_json
from tests.crash.found import repeated, rows
from tests.crash.processes import wait_until


@localtrace.op
def generate(prompt_ids: list[int], finish: Any) -> dict[str, Any]:
    return {"output_ids": [1, 2], "finish_reason": finish}


@localtrace.op
def look_up(word: str) -> str:
    if word == "missing":
        raise LookupError(word)
    return word


def roll_out(
    step: int | None = 1,
    sample_index: int | str | None = None,
    *,
    reward: float | None = None,
    word: str = "word",
    finish: Any = "stop",
    **fields: Any,
) -> str:
    """One trajectory of a turn and a call, which may fail without ending it; its trace id."""
    with localtrace.trajectory(step, sample_index, **fields) as t:
        generate([1], finish)
        with contextlib.suppress(LookupError):
            look_up(word)
        if reward is not None:
            t.set(reward=reward)
    return t.trace_id


@contextlib.contextmanager
def rolling(step: int, sample_index: int) -> Iterator[str]:
    """A trajectory that is open in the journal for the length of a with block."""
    with localtrace.trajectory(step, sample_index) as t:
        look_up("word")
        localtrace.flush()
        yield t.trace_id


def rotate(store: Path) -> None:
    """Wait until everything recorded so far is in journals that may be sealed.

    The store must be recorded with `rotate_max_bytes=1`.
    """
    localtrace.flush()
    wait_until(lambda: not any(map(_holds_records, _live(store))))


def _live(store: Path) -> Iterator[list[bytes]]:
    for file, status in list_journals([store / "journals"]):
        if status is JournalStatus.LIVE:
            yield read_frames(read_journal(file), file.name.marker).payloads


def _holds_records(payloads: list[bytes]) -> bool:
    records = [decode_envelope(payload).record for payload in payloads]
    return not all(isinstance(record, Opened | Begin) for record in records)


def kept(store: Path) -> set[str]:
    """Trace ids of trajectories that are not marked as left out.

    Fails unless those that are have no spans, and all others each of theirs, once.
    """
    found = rows(store, "spans")
    assert repeated(row["span_id"] for row in found) == []
    spans: dict[str, int] = {}
    for row in found:
        spans[row["trace_id"]] = spans.get(row["trace_id"], 0) + 1
    trajectories = rows(store, "trajectories")
    assert repeated(row["trace_id"] for row in trajectories) == []
    marked = {row["trace_id"]: SAMPLED_OUT in from_json(row["attributes"]) for row in trajectories}
    assert spans.keys() == {trace_id for trace_id, left_out in marked.items() if not left_out}
    for row in trajectories:
        if row["span_count"] is not None and not marked[row["trace_id"]]:
            assert spans[row["trace_id"]] == row["span_count"]
    return set(spans)
