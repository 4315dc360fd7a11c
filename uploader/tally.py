"""What became of each trajectory of an upload so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from localtrace.uploader.receipt import Delivery, TraceReceipt
from localtrace.uploader.targets import Record


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an upload is."""

    done: int
    """Trajectories that were sent, were there already, or were rejected."""
    total: int
    sent_bytes: int


class Tally:
    """Collects the trajectories' results and tells the progress."""

    def __init__(self, total: int, on_progress: Callable[[Progress], None]) -> None:
        self.total = total
        self._on_progress = on_progress
        self._results: dict[str, TraceReceipt] = {}
        self._deliveries: Counter[Delivery] = Counter()
        self._sent_bytes = 0

    @property
    def done(self) -> int:
        """How many trajectories have a result."""
        return len(self._results)

    @property
    def results(self) -> list[TraceReceipt]:
        """All results, in the order in which they came."""
        return list(self._results.values())

    def count(self, delivery: Delivery) -> int:
        """How many trajectories were delivered so."""
        return self._deliveries[delivery]

    def has(self, trace_id: str) -> bool:
        """Whether a trajectory has a result."""
        return trace_id in self._results

    def add(self, trace_id: str, delivery: Delivery, reason: str) -> None:
        """Note a trajectory that has no record at the target."""
        self._add(TraceReceipt(trace_id, delivery, reason=reason))

    def add_record(self, record: Record, delivery: Delivery, reason: str | None = None) -> None:
        """Note a record that was sent, was there already, or was rejected."""
        entry = record.entry
        if delivery is Delivery.SENT:
            self._sent_bytes += record.size_bytes
        self._add(
            TraceReceipt(
                entry.trace_id, delivery, entry.remote_id, entry.digest, record.size_bytes,
                entry.span_count, reason, cuts=list(record.cuts),
            )
        )  # fmt: skip

    def verified(self, trace_ids: Iterable[str]) -> None:
        """Note which trajectories were read back from the target."""
        for trace_id in trace_ids:
            self._results[trace_id] = replace(self._results[trace_id], verified=True)

    def _add(self, result: TraceReceipt) -> None:
        self._deliveries[result.delivery] += 1
        self._results[result.trace_id] = result
        self._on_progress(Progress(len(self._results), self.total, self._sent_bytes))
