"""An upload is foretold without doing it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from localtrace.redaction.redaction import Redaction
from localtrace.uploader.estimation import USUAL_BYTES_PER_S, Estimate, measure
from localtrace.uploader.ledger import Ledger
from localtrace.uploader.plan import Limits
from localtrace.uploader.receipts import receipts_folder, write_receipt
from localtrace.uploader.records import Records
from localtrace.uploader.selection import Choice, ChosenRun
from tests.unit.test_uploader_replay import IDS, RUN, MemoryStore, MemoryTarget, trajectory


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    monkeypatch.setenv("LOCALTRACE_STATE_DIR", str(tmp_path))
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
        return measure(choice, records, ledger, Limits(**limits), None, lambda progress: None)

    return run


def test_everything_is_counted_as_the_target_counts_it(estimate) -> None:
    result = estimate(unknown=["f" * 32])
    counts = result.receipt.counts
    assert (counts["selected"], counts["sent"], counts["sent_bytes"]) == (101, 100, 1000)
    assert result.receipt.rejected == {"f" * 32: "not in the store"}
    assert (result.duration_s, result.measured) == (1000 / USUAL_BYTES_PER_S, False)


def test_what_the_ledger_knows_to_be_there_is_skipped(estimate, ledger) -> None:
    target = MemoryTarget()
    place = target.place(RUN, None)
    earlier = estimate().receipt
    made = replace(earlier, runs=[replace(earlier.runs[0], place=place)])
    write_receipt(made, receipts_folder())
    there = [target.encode(trajectory(trace_id), place).entry for trace_id in IDS[:30]]
    ledger.mark(there, accepted=True)
    counts = estimate().receipt.counts
    assert (counts["already there"], counts["sent"]) == (30, 70)


def test_what_is_over_the_limit_is_left_for_the_next_time(estimate) -> None:
    counts = estimate(max_bytes=255).receipt.counts
    assert (counts["sent"], counts["left out"], counts["sent_bytes"]) == (25, 75, 250)


def test_the_time_follows_from_the_bytes_of_the_last_uploads_there_and_from_the_rate(
    estimate,
) -> None:
    earlier = estimate().receipt
    times = {"started_at": "2026-11-21T10:00:00Z", "ended_at": "2026-11-21T10:00:02Z"}
    few = {"selected": 400, "sent": 1, "sent_bytes": 10}
    for number, changes in enumerate((
        {"counts": {"selected": 400, "sent": 400, "sent_bytes": 4000}},
        {"counts": {"selected": 400, "sent": 0, "sent_bytes": 0}},
        {"target": "elsewhere:"},
        # too short to tell much: it sent little, and counts as a second
        {"counts": few, "ended_at": "2026-11-21T10:00:00.01Z"},
    )):  # fmt: skip
        named = {"upload_id": f"20261121T10000{number}Z-a"}
        write_receipt(replace(earlier, **{**times, **named, **changes}), receipts_folder())
    result = estimate()
    assert result.duration_s == pytest.approx(1000 / (4010 / 3))
    assert result.measured
    assert estimate(rate_bytes_per_s=100).duration_s == 10.0


def test_the_time_follows_from_uploads_of_trajectories_of_the_same_size(estimate) -> None:
    earlier = estimate().receipt
    times = {"started_at": "2026-11-21T10:00:00Z", "ended_at": "2026-11-21T10:00:10Z"}
    for number in range(10):
        # Later uploads are of larger trajectories, and faster by bytes.
        size_bytes = 11 if number < 5 else 1100
        counts = {"selected": 100, "sent": 100, "sent_bytes": 100 * size_bytes}
        named = {"upload_id": f"20261121T10000{number}Z-a", "counts": counts}
        write_receipt(replace(earlier, **times, **named), receipts_folder())
    assert estimate().duration_s == pytest.approx(1000 / (1100 / 10))


def test_what_cannot_be_sent_is_named_with_its_reason(estimate, store) -> None:
    store.trajectories[IDS[0]] = trajectory(IDS[0], {"size_bytes": 101})
    receipt = estimate(IDS[:2]).receipt
    assert receipt.rejected.keys() == {IDS[0]}
    assert re.search(r"\b101 bytes.*\b100\b", receipt.rejected[IDS[0]])
    assert receipt.counts["sent"] == 1
