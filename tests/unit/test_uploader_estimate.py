"""An upload is foretold without doing it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from localtrace.redaction.redaction import Redaction
from localtrace.uploader.estimation import Estimate, measure
from localtrace.uploader.ledger import Ledger, State
from localtrace.uploader.plan import Limits, Records
from localtrace.uploader.selection import Choice, ChosenRun
from tests.unit.test_uploader_replay import IDS, RUN, MemoryStore, MemoryTarget, trajectory


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path)) as opened:
        yield opened


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def estimate(ledger: Ledger, store: MemoryStore) -> Callable[..., Estimate]:
    def run(ids: Sequence[str] = IDS, unknown: Sequence[str] = (), **limits: Any) -> Estimate:
        records = Records(store, MemoryTarget(), Redaction.load(None))
        choice = Choice("test", [ChosenRun(RUN, list(ids))], list(unknown))
        return measure(records, ledger, choice, None, Limits(**limits), lambda progress: None)

    return run


def test_everything_is_counted_as_the_target_counts_it(estimate) -> None:
    found = estimate(unknown=["f" * 32])
    assert (found.selected, found.to_send, found.size_bytes) == (101, 100, 1000)
    assert found.rejected == {"f" * 32: "not in the store"}
    assert (found.duration_s, found.measured) == (2.0, False)


def test_what_the_ledger_knows_to_be_there_is_skipped(estimate, ledger) -> None:
    target = MemoryTarget()
    place = target.place(RUN, None)
    ledger.remember_place(target.uri, None, RUN, place)
    there = [target.encode(trajectory(trace_id), place).entry for trace_id in IDS[:30]]
    ledger.mark(there, State.ACCEPTED)
    found = estimate()
    assert (found.present, found.to_send) == (30, 70)


def test_what_is_over_the_limit_is_left_for_the_next_time(estimate) -> None:
    found = estimate(max_bytes=255)
    assert (found.to_send, found.over_limit, found.size_bytes) == (25, 75, 250)


def test_the_time_follows_from_the_last_upload_there_and_from_the_rate(estimate, ledger) -> None:
    ledger.remember_speed(MemoryTarget.uri, trajectories=400, duration_s=2.0)
    found = estimate()
    assert (found.duration_s, found.measured) == (0.5, True)
    assert estimate(rate_bytes_per_s=100).duration_s == 10.0


def test_what_cannot_be_sent_is_named_with_its_reason(estimate, store) -> None:
    store.trajectories[IDS[0]] = trajectory(IDS[0], {"size_bytes": 101})
    found = estimate(IDS[:2])
    assert found.rejected.keys() == {IDS[0]}
    assert re.search(r"\b101 bytes.*\b100\b", found.rejected[IDS[0]])
    assert found.to_send == 1
