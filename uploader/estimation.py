"""The dry run: an upload's plan, counted without contacting the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from localtrace.uploader.ledger import Ledger
from localtrace.uploader.plan import Batch, Limits, Plan, Progress, Records
from localtrace.uploader.receipts import Delivery
from localtrace.uploader.selection import NOT_IN_STORE, Choice

USUAL_TRAJECTORIES_PER_S = 50.0
"""Speed of an upload, for estimates before the first one."""


@dataclass(slots=True)
class Estimate:
    """The trajectories and bytes that an upload would send, and those that it would skip."""

    target: str
    """The target's address, without secrets."""
    selected: int
    containers: list[str] = field(default_factory=list)
    """Names of the experiments or projects at the target."""
    to_send: int = 0
    size_bytes: int = 0
    """Size of the request bodies."""
    present: int = 0
    """Number that the target holds already, according to the ledger."""
    over_limit: int = 0
    """Number left for the next upload by the limit on bytes."""
    cuts: int = 0
    """Number of values that would be shortened to what the target accepts."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Reasons why trajectories cannot be sent, by trace id."""
    left_out: dict[str, int] = field(default_factory=dict)
    redactions: dict[str, int] = field(default_factory=dict)
    unsearched: dict[str, int] = field(default_factory=dict)
    """Amount of content that could not be searched for keys, by kind."""
    duration_s: float = 0.0
    measured: bool = False
    """True if the duration follows from the last upload to this target, not from a default."""


def measure(
    records: Records,
    ledger: Ledger,
    choice: Choice,
    container: str | None,
    limits: Limits,
    on_progress: Callable[[Progress], None],
) -> Estimate:
    """Count the plan of a choice, for the places that the ledger knows."""
    target = records.target
    rejected = dict.fromkeys(choice.unknown, NOT_IN_STORE)
    estimate = Estimate(target.uri, choice.total, rejected=rejected)
    for part in choice.runs:
        expected = target.expected(part.run, container)
        place = ledger.place(target.uri, container, part.run) or expected
        name = place.container or place.experiment or expected.container
        estimate.containers += [name] if name not in estimate.containers else []
        plan = Plan(records, ledger, limits, part, place, planned_bytes=estimate.size_bytes)
        for step in plan.steps():
            if isinstance(step, Batch):
                estimate.to_send += len(step.records)
                estimate.size_bytes += step.size_bytes
                estimate.cuts += sum(len(record.cuts) for record in step.records)
            elif step.receipt.delivery is Delivery.REJECTED:
                rejected[step.receipt.trace_id] = step.receipt.reason or ""
            else:
                is_present = step.receipt.delivery is Delivery.PRESENT
                estimate.present += is_present
                estimate.over_limit += not is_present
            done = estimate.to_send + estimate.present + estimate.over_limit + len(rejected)
            on_progress(Progress(done, choice.total, estimate.size_bytes))
    estimate.left_out = dict(records.left_out)
    estimate.redactions = dict(records.redaction.counts)
    estimate.unsearched = dict(records.redaction.unsearched)
    known_speed = ledger.speed(target.uri)
    estimate.measured = known_speed is not None
    estimate.duration_s = estimate.to_send / (known_speed or USUAL_TRAJECTORIES_PER_S)
    if limits.rate_bytes_per_s:
        estimate.duration_s = max(
            estimate.duration_s, estimate.size_bytes / limits.rate_bytes_per_s
        )
    return estimate
