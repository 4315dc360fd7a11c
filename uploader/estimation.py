"""The dry run: an upload's plan, counted without contacting the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localtrace.uploader.ledger import Ledger
from localtrace.uploader.plan import Batch, Limits, Plan, Progress, Tally, receipt_of
from localtrace.uploader.receipts import Delivery, Receipt, list_uploads, receipts_folder
from localtrace.uploader.records import Records
from localtrace.uploader.selection import Choice

USUAL_TRAJECTORIES_PER_S = 50.0
"""Speed of an upload, for estimates before the first one."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an upload would do."""

    receipt: Receipt
    """What its receipt would say; `sent` is what it would send."""
    duration_s: float
    measured: bool
    """True if the duration follows from the last upload to this target, not from a default."""


def measure(
    choice: Choice,
    records: Records,
    ledger: Ledger,
    limits: Limits,
    container: str | None,
    on_progress: Callable[[Progress], None],
) -> Estimate:
    """Count the plan of a choice, for the places that the ledger knows."""
    target, tally = records.target, Tally(choice, on_progress)
    for part in choice.runs:
        place = ledger.place(target.uri, container, part.run)
        place = place or target.expected(part.run, container)
        tally.begin(part, place)
        plan = Plan(records, ledger, limits, part, place, planned_bytes=tally.sent_bytes)
        for step in plan.steps():
            if isinstance(step, Batch):
                for record in step.records:
                    tally.add(receipt_of(record, Delivery.SENT, sent_bytes=record.size_bytes))
            else:
                tally.add(step.receipt)
    receipt = tally.receipt(records)
    speed = _last_speed(target.uri)
    duration_s = receipt.counts["sent"] / (speed or USUAL_TRAJECTORIES_PER_S)
    if limits.rate_bytes_per_s:
        duration_s = max(duration_s, tally.sent_bytes / limits.rate_bytes_per_s)
    return Estimate(receipt, duration_s, speed is not None)


def _last_speed(target: str) -> float | None:
    """Return the trajectories per second of the last upload to a target that sent any."""
    uploads, _ = list_uploads(receipts_folder())
    return next((u.speed for u in uploads if u.target == target and u.counts.get("sent")), None)
