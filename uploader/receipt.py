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

from localtrace.uploader.targets import Place

RECEIPT_VERSION = 1


class Delivery(StrEnum):
    """What this upload did with a trajectory."""

    SENT = "sent"
    PRESENT = "already there"
    REJECTED = "rejected"


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
    reason: str | None = None
    """Why it was rejected."""
    verified: bool = False
    """It was read back from the target, in its run, with this digest."""


@dataclass(frozen=True, slots=True)
class RunReceipt:
    """One run of the selection."""

    run_id: str
    attempt: int
    experiment: str
    """Name of the experiment at the target."""
    place: Place


@dataclass(frozen=True, slots=True)
class Receipt:
    """The proof of what a target holds of a selection."""

    upload_id: str
    store: str
    selection: str
    target: str
    started_at: str
    ended_at: str
    runs: list[RunReceipt]
    traces: list[TraceReceipt]
    counts: dict[str, int] = field(default_factory=dict)
    """selected, sent, already there, rejected, verified; and sent_bytes."""
    format_version: int = RECEIPT_VERSION

    @property
    def complete(self) -> bool:
        """Every trajectory of the selection was read back from the target."""
        return all(trace.verified for trace in self.traces)

    def file_in(self, folder: Path) -> Path:
        """Where the uploader's folder keeps this receipt."""
        return folder / "receipts" / f"{self.upload_id}.json"

    def write(self, path: Path) -> None:
        """Write the receipt as JSON; the file appears only when it is whole."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_bytes(text + b"\n")
        unfinished.replace(path)


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
