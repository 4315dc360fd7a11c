"""Trajectories in groups, and which of them kept their calls."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import localtrace
from tests.crash.found import rows


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


def kept(store: Path) -> set[str]:
    """Trace ids of trajectories whose calls were not pruned.

    Fails unless those that were have no spans, and all others each of theirs, once.
    """
    spans = Counter(row["trace_id"] for row in rows(store, "spans"))
    counts = {
        row["trace_id"]: row["span_count"]
        for row in rows(store, "trajectories")
        if row["spans_pruned"] is None
    }
    assert spans.keys() == counts.keys()
    assert all(count in (None, spans[trace_id]) for trace_id, count in counts.items())
    return set(spans)
