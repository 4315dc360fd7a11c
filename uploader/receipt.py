"""The receipt: the proof of what an upload sent, found at the target, and read back."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from localtrace.redaction.redaction import Redaction
from localtrace.store.files import put_file
from localtrace.terminal import escape
from localtrace.uploader.targets import Cut, Place
from localtrace.version import __version__

RECEIPT_VERSION = 2
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Delivery(StrEnum):
    """The result of an upload for one trajectory."""

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
    """Its id at the target."""
    digest: str | None = None
    """sha256 of the record at the target."""
    size_bytes: Size = 0
    span_count: Size = 0
    reason: str | None = None
    """Reason why it was rejected or left out."""
    verified: bool = False
    """True if it was read back from the target, in its run, with this digest."""
    cuts: tuple[Cut, ...] = ()
    """Values shortened to what the target accepts."""
    sent_bytes: Size | None = None
    """Bytes sent: fewer than `size_bytes` if only a part had changed.

    None: nothing was to be sent.
    """
    replaces: bool = False
    """True if the target held an earlier version of it."""


@dataclass(frozen=True, slots=True)
class RunReceipt:
    """One run of the selection."""

    run_id: str
    attempt: int
    container: str
    """Name of the experiment or project at the target."""
    place: Place
    metrics: dict[str, int] = field(default_factory=dict)
    """Number of values at the target by recorded name, if metrics were sent."""
    metric_names: dict[str, str] = field(default_factory=dict)
    """Name at the target by recorded name, where they differ."""
    metrics_problem: str | None = None
    """Reason why some metrics, or the configuration, are missing at the target."""
    parameters: int = 0
    """Number of parameters at the target, if metrics were sent: they are the configuration."""
    parameter_notes: tuple[str, ...] = ()
    """Remarks on parameters that the target holds otherwise, or not at all."""

    @property
    def beside(self) -> str:
        """The counts of metrics and parameters, in words after a comma; empty without any."""
        values = f", {sum(self.metrics.values())} metric values" if self.metrics else ""
        return values + (f", {self.parameters} parameters" if self.parameters else "")


@dataclass(frozen=True, slots=True)
class Receipt:
    """The proof of what a target holds of a selection."""

    upload_id: str
    store: str
    """Its folder; several are separated by commas."""
    store_id: str
    """Empty for several stores."""
    selection: str
    kind: str
    target: str
    started_at: str
    ended_at: str
    runs: list[RunReceipt]
    traces: list[TraceReceipt]
    counts: dict[str, int] = field(default_factory=dict)
    """Totals by name, as `count` computes them."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of values that recording had dropped, by field and reason."""
    redactions: dict[str, int] = field(default_factory=dict)
    """Number of replacements, by rule."""
    unsearched: dict[str, int] = field(default_factory=dict)
    """Amount of content that could not be searched for keys, by kind."""
    reads_back: bool = True
    """False if the target cannot be asked: `sent` then means accepted, not verified."""
    double_rows: Size | None = None
    """Rows that the target showed beyond one per call, and will merge; None if it never has any."""
    localtrace_version: str = __version__
    format_version: int = RECEIPT_VERSION

    @property
    def complete(self) -> bool:
        """True if everything was read back or, at targets that cannot be asked, accepted."""
        return is_complete(count(self.traces), self.reads_back) and not self.problems

    @property
    def failures(self) -> dict[str, str]:
        """Reasons by trace id why trajectories, other than those left out, are not there."""
        reasons = {}
        for trace in self.traces:
            if trace.delivery is Delivery.REJECTED:
                reasons[trace.trace_id] = trace.reason or "rejected"
            elif self.reads_back and not trace.verified and trace.delivery is not Delivery.LEFT_OUT:
                reasons[trace.trace_id] = "not found when it was read back"
        return reasons

    @property
    def problems(self) -> list[str]:
        """Failures that concern no single trajectory."""
        return [f"run {r.run_id}: {r.metrics_problem}" for r in self.runs if r.metrics_problem]

    def json_parts(self) -> Iterator[bytes]:
        """Yield the receipt as indented JSON, safe to print; equal receipts give equal bytes.

        It comes in parts, because the receipt of a million trajectories takes 350 MB.
        """
        before, empty, after = _json(replace(self, traces=[])).partition(b'"traces": []')
        if not self.traces:
            yield before + empty + after + b"\n"
            return
        yield before + b'"traces": ['
        for number, trace in enumerate(self.traces):
            yield (b",\n" if number else b"\n") + b"    "
            yield _json(trace).replace(b"\n", b"\n    ")
        yield b"\n  ]" + after + b"\n"

    def to_json(self) -> bytes:
        """Return the JSON of `json_parts` as a whole."""
        return b"".join(self.json_parts())

    def write_json(self, path: Path) -> None:
        """Write the receipt as JSON, without keys. The file appears when it is complete."""
        put_file(path, self.without_keys().json_parts())

    def without_keys(self) -> Receipt:
        """Return the receipt with everything replaced that looks like a key.

        A selection may search for a key, and a server's reason may repeat one.
        """
        text = Redaction.load(None).text
        return replace(
            self,
            store=text(self.store),
            selection=text(self.selection),
            target=text(self.target),
            runs=[
                replace(run, metrics_problem=text(run.metrics_problem))
                if run.metrics_problem
                else run
                for run in self.runs
            ],
            traces=[
                replace(trace, reason=text(trace.reason)) if trace.reason else trace
                for trace in self.traces
            ],
        )


def _json(value: Receipt | TraceReceipt) -> bytes:
    """Format a value as indented JSON, safe to print."""
    try:
        text = msgspec.json.encode(value, order="deterministic")
    except UnicodeEncodeError:  # lone surrogates: a path that is not UTF-8, a server's answer
        plain = msgspec.to_builtins(value, order="deterministic")
        text = json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace")
    return escape(msgspec.json.format(text, indent=2).decode()).encode()


def is_complete(counts: dict[str, int], reads_back: bool) -> bool:
    """Return whether everything selected is at the target.

    Args:
        counts: the totals of `count`.
    """
    there = ("verified",) if reads_back else (Delivery.SENT, Delivery.PRESENT)
    return sum(counts.get(name, 0) for name in there) == counts.get("selected")


def count(traces: list[TraceReceipt]) -> dict[str, int]:
    """Return the totals of a receipt: trajectories by result, and the bytes sent."""
    deliveries = Counter(trace.delivery for trace in traces)
    return {
        "selected": len(traces),
        **{delivery.value: deliveries[delivery] for delivery in Delivery},
        "verified": sum(trace.verified for trace in traces),
        "replaced": sum(trace.replaces for trace in traces),
        "sent_bytes": sum(
            trace.size_bytes if trace.sent_bytes is None else trace.sent_bytes
            for trace in traces
            if trace.delivery is Delivery.SENT
        ),
    }


def now() -> str:
    """Return the current time as ISO text in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def new_upload_id() -> str:
    """Return a new name for an upload. Names sort by time."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"
