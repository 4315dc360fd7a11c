"""The dry run: an estimate of an upload, made without contacting the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from localtrace.uploader.ledger import Ledger
from localtrace.uploader.limits import Limits
from localtrace.uploader.progress import Progress
from localtrace.uploader.records import NOT_IN_STORE, Records
from localtrace.uploader.selection import Choice

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
    """Build every record of a choice, count its bytes, and look it up in the ledger."""
    target = records.target
    total = len(choice.trace_ids) + len(choice.unknown)
    found = Estimate(target.uri, total, rejected=dict.fromkeys(choice.unknown, NOT_IN_STORE))
    found.rejected |= choice.refused()
    done = len(found.rejected)
    containers: dict[str, None] = {}
    for part in choice.runs:
        expected = target.expected(part.run, container)
        place = ledger.place(target.uri, container, part.run) or expected
        containers[place.container or place.experiment or expected.container] = None
        goes = partial(ledger.places, place)
        for record in records.of(part, goes, found.rejected.__setitem__):
            done += 1
            on_progress(Progress(done, total, found.size_bytes))
            entry = record.entry
            if ledger.holds(entry):
                found.present += 1
            elif found.size_bytes + record.size_bytes > (limits.max_bytes or float("inf")):
                found.over_limit += 1
            else:
                found.to_send += 1
                found.size_bytes += record.size_bytes
                found.cuts += len(record.cuts)
    found.containers = list(containers)
    found.left_out = dict(records.left_out)
    found.redactions = dict(records.redaction.counts)
    found.unsearched = dict(records.redaction.unsearched)
    known_speed = ledger.speed(target.uri)
    found.measured = known_speed is not None
    found.duration_s = found.to_send / (known_speed or USUAL_TRAJECTORIES_PER_S)
    if limits.rate_bytes_per_s:
        found.duration_s = max(found.duration_s, found.size_bytes / limits.rate_bytes_per_s)
    return found
