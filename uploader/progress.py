"""The results of an upload so far, one for each trajectory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from localtrace.uploader.receipts import Delivery, TraceReceipt
from localtrace.uploader.targets import Entry, Record

if TYPE_CHECKING:
    from localtrace.uploader.sending import Answer


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of an upload, for a progress bar."""

    done: int
    """Number of trajectories with a result: sent, already there, rejected or left out."""
    total: int
    sent_bytes: int
    doing: str = ""
    """Text for people about the thing waited for, while nothing is sent."""


class Tally:
    """The results by trajectory; each new one is reported as progress."""

    def __init__(self, total: int, on_progress: Callable[[Progress], None]) -> None:
        self.total = total
        self._on_progress = on_progress
        self._results: dict[str, TraceReceipt] = {}
        self._deliveries: Counter[Delivery] = Counter()
        self._sent_bytes = 0
        self.double_rows: int | None = None
        """Rows that the target shows beyond one per call; None if it was not asked."""

    @property
    def done(self) -> int:
        """Number of trajectories with a result."""
        return len(self._results)

    @property
    def results(self) -> list[TraceReceipt]:
        """All results, in the order of arrival."""
        return list(self._results.values())

    def count(self, delivery: Delivery) -> int:
        """Return the number of trajectories with this result."""
        return self._deliveries[delivery]

    def has(self, trace_id: str) -> bool:
        """Return whether a trajectory has a result."""
        return trace_id in self._results

    def add(self, trace_id: str, delivery: Delivery, reason: str) -> None:
        """Add the result of a trajectory for which there is no record."""
        self._add(TraceReceipt(trace_id, delivery, reason=reason))

    def add_answer(self, answer: Answer) -> None:
        """Add the result of a record after the target's answer."""
        self._sent_bytes += answer.sent_bytes
        self._add(
            replace(
                _receipt(answer.record, answer.delivery, answer.reason),
                sent_bytes=answer.sent_bytes,
                replaces=answer.replaces,
            )
        )

    def add_record(self, record: Record, delivery: Delivery, reason: str | None = None) -> None:
        """Add the result of a record that is not sent."""
        self._add(_receipt(record, delivery, reason))

    def add_entry(self, entry: Entry) -> None:
        """Add a trajectory that the target holds, for which no record was built."""
        self._add(
            TraceReceipt(
                entry.trace_id, Delivery.PRESENT, entry.remote_id, entry.digest,
                span_count=entry.span_count,
            )
        )  # fmt: skip

    def verified(self, trace_ids: Iterable[str]) -> None:
        """Mark the trajectories that were read back from the target."""
        for trace_id in trace_ids:
            self._results[trace_id] = replace(self._results[trace_id], verified=True)

    def tell(self, doing: str) -> None:
        """Report what the upload waits for now."""
        self._on_progress(Progress(len(self._results), self.total, self._sent_bytes, doing))

    def add_double_rows(self, count: int) -> None:
        """Add to the number of rows that the target shows beyond one per call."""
        self.double_rows = (self.double_rows or 0) + count

    def _add(self, result: TraceReceipt) -> None:
        self._deliveries[result.delivery] += 1
        self._results[result.trace_id] = result
        self._on_progress(Progress(len(self._results), self.total, self._sent_bytes))


def _receipt(record: Record, delivery: Delivery, reason: str | None) -> TraceReceipt:
    entry = record.entry
    return TraceReceipt(
        entry.trace_id, delivery, entry.remote_id, entry.digest, record.size_bytes,
        entry.span_count, reason, cuts=record.cuts,
    )  # fmt: skip
