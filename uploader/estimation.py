"""The dry run: an upload's plan, counted without contacting the target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from localtrace.types import Run
from localtrace.uploader.ledger import Ledger
from localtrace.uploader.plan import Batch, Limits, Plan, Progress, Tally, receipt_of
from localtrace.uploader.receipts import Delivery, Receipt, Summary, list_uploads, receipts_folder
from localtrace.uploader.records import Records
from localtrace.uploader.selection import Choice
from localtrace.uploader.targets import Place

USUAL_BYTES_PER_S = 4e6
"""Speed of an upload, for estimates before the first one."""
UPLOADS_COUNTED = 5
"""Number of uploads whose bytes and seconds are added up: a short one then tells little."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The outcome of an upload that is not carried out."""

    receipt: Receipt
    """What its receipt would say; `sent` is what it would send."""
    duration_s: float
    measured: bool
    """True if the duration follows from earlier uploads to this target, not from a default."""


def measure(
    choice: Choice,
    records: Records,
    ledger: Ledger,
    limits: Limits,
    container: str | None,
    on_progress: Callable[[Progress], None],
) -> Estimate:
    """Count the plan of a choice, for the places of earlier uploads."""
    target, tally = records.target, Tally(choice, on_progress)
    uploads = [u for u in list_uploads(receipts_folder())[0] if u.target == target.uri]
    for part in choice.runs:
        place = _place(uploads, target.expected(part.run, container), part.run)
        tally.begin(part, place)
        plan = Plan(records, ledger, limits, part, place, planned_bytes=tally.sent_bytes)
        for step in plan.steps():
            if isinstance(step, Batch):
                for record in step.records:
                    tally.add(receipt_of(record, Delivery.SENT, sent_bytes=record.size_bytes))
            else:
                tally.add(step.receipt)
    receipt = tally.receipt(records)
    similar = _most_similar(uploads, receipt.counts)
    similar_bytes = sum(upload.counts["sent_bytes"] for upload in similar)
    similar_s = sum(upload.duration_s for upload in similar)
    speed = similar_bytes / similar_s if similar else USUAL_BYTES_PER_S
    duration_s = tally.sent_bytes / speed
    if limits.rate_bytes_per_s:
        duration_s = max(duration_s, tally.sent_bytes / limits.rate_bytes_per_s)
    return Estimate(receipt, duration_s, measured=bool(similar))


def _most_similar(uploads: Sequence[Summary], planned: Mapping[str, int]) -> list[Summary]:
    """Return the uploads whose trajectories are closest in size to the planned ones.

    Short trajectories cost more seconds per byte than long ones. Of equals, the last ones count.
    """

    def size_log(counts: Mapping[str, int]) -> float:
        return math.log(max(counts["sent_bytes"], 1) / max(counts["sent"], 1))

    sent_some = [upload for upload in uploads if upload.counts.get("sent_bytes")]
    wanted = size_log(planned)
    return sorted(sent_some, key=lambda u: abs(size_log(u.counts) - wanted))[:UPLOADS_COUNTED]


def _place(uploads: Sequence[Summary], expected: Place, run: Run) -> Place:
    """Return the place where a run's trajectories went before, otherwise the expected one.

    Only the target knows it in full, and a dry run does not ask.
    """
    key = (run.run_id, run.attempt, expected.container or expected.experiment)
    runs = (receipt for upload in uploads for receipt in upload.runs)
    before = (r.place for r in runs if (r.run_id, r.attempt, r.container) == key)
    return next(before, expected)
