"""The receipt: what an upload sent, what was there already, and what was read back."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import msgspec

from localtrace.uploader.targets import Cut, Place
from localtrace.version import __version__

RECEIPT_VERSION = 2


class Delivery(StrEnum):
    """What this upload did with a trajectory."""

    SENT = "sent"
    PRESENT = "already there"
    REJECTED = "rejected"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class TraceReceipt:
    """One trajectory of the selection."""

    trace_id: str
    delivery: Delivery
    remote_id: str | None = None
    """The target's id of it."""
    digest: str | None = None
    """sha256 of what the target holds."""
    size_bytes: int = 0
    span_count: int = 0
    reason: str | None = None
    """Why it was rejected or left out."""
    verified: bool = False
    """It was read back from the target, in its run, with this digest."""
    cuts: list[Cut] = field(default_factory=list)
    """Values that were shortened for the target."""


@dataclass(frozen=True, slots=True)
class RunReceipt:
    """One run of the selection."""

    run_id: str
    attempt: int
    container: str
    """Name of the experiment or project at the target."""
    place: Place
    metrics: dict[str, int] = field(default_factory=dict)
    """By recorded name how many values the target holds, where metrics were sent."""
    metric_names: dict[str, str] = field(default_factory=dict)
    """By recorded name the name at the target, where it differs."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The proof of what a target holds of a selection."""

    upload_id: str
    store: str
    store_id: str
    selection: str
    kind: str
    target: str
    started_at: str
    ended_at: str
    runs: list[RunReceipt]
    traces: list[TraceReceipt]
    counts: dict[str, int] = field(default_factory=dict)
    """selected, sent, already there, rejected, left out, verified; and sent_bytes."""
    left_out: dict[str, int] = field(default_factory=dict)
    """What recording had dropped, by field and reason."""
    redactions: dict[str, int] = field(default_factory=dict)
    reads_back: bool = True
    """False: the target cannot be asked, so `sent` means accepted, not verified."""
    localtrace_version: str = __version__
    format_version: int = RECEIPT_VERSION

    @property
    def complete(self) -> bool:
        """Everything is there: read back, or, where that cannot be done, accepted."""
        if self.reads_back:
            return all(trace.verified for trace in self.traces)
        return all(t.delivery in (Delivery.SENT, Delivery.PRESENT) for t in self.traces)

    @property
    def failures(self) -> dict[str, str]:
        """By trace id why a trajectory is not there, though it was to be sent."""
        reasons = {}
        for trace in self.traces:
            if trace.delivery is Delivery.REJECTED:
                reasons[trace.trace_id] = trace.reason or "rejected"
            elif self.reads_back and not trace.verified and trace.delivery is not Delivery.LEFT_OUT:
                reasons[trace.trace_id] = "not found when it was read back"
        return reasons

    def write_json(self, path: Path) -> None:
        """Write the receipt as JSON; the file appears only when it is whole."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_bytes(text + b"\n")
        unfinished.replace(path)

    def write(self, folder: Path) -> None:
        """Write the receipt into a folder, as JSON and as a page."""
        self.write_json(folder / f"{self.upload_id}.json")


def count(traces: list[TraceReceipt]) -> dict[str, int]:
    """The sums that a receipt shows first."""
    deliveries = Counter(trace.delivery for trace in traces)
    return {
        "selected": len(traces),
        **{delivery.value: deliveries[delivery] for delivery in Delivery},
        "verified": sum(trace.verified for trace in traces),
        "sent_bytes": sum(trace.size_bytes for trace in traces if trace.delivery is Delivery.SENT),
    }


def now() -> str:
    """The current time as ISO text, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def new_upload_id() -> str:
    """A name for an upload; names sort by time."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
