"""Deliver batches: send, repeat and halve them until each record has an answer.

After a failure with an unknown outcome, the target is asked what it holds before anything is sent
again. This module does not know the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Event

from localtrace.errors import TargetRejected, TargetUnavailable
from localtrace.uploader.receipts import Delivery
from localtrace.uploader.retry import patiently
from localtrace.uploader.targets import Record, Target
from localtrace.uploader.targets.http import Doubtful, TryAgain

PROBES = 3
"""Failures in a row on single records after which a server may be broken."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of sending one record."""

    record: Record
    delivery: Delivery
    reason: str | None = None
    """Reason why it was rejected."""
    sent_bytes: int = 0
    replaces: bool = False
    """True if the target held an earlier version of it."""


class Sender:
    """The delivery of batches to one target. Several threads may share it."""

    def __init__(self, target: Target, patience_s: float, ended: Event) -> None:
        self._target = target
        self._patience_s = patience_s
        self._ended = ended
        self._taken: Record | None = None
        """A record that the target has taken during this upload."""
        self._failed_alone = 0
        """Number of records, sent alone, on which the target failed since it last took any."""

    def deliver(self, batch: list[Record], ask: bool) -> list[Answer]:
        """Send a batch; if the target refuses it, halve it until the bad record is alone.

        Args:
            ask: ask the target first, because it may hold some of these records.

        Raises:
            TryAgain: the target stopped answering.
            TargetUnavailable: the target fails whatever it is sent.
            UploadError: the target takes no records at all.
        """
        delivery = _Delivery(self._target, batch, ask)
        try:
            patiently(self._patience_s, self._ended)(delivery.attempt)
        except (TargetRejected, Doubtful) as error:
            if len(batch) == 1:
                self._note_failure(error)
                return [Answer(batch[0], Delivery.REJECTED, str(error))]
            # Ask first: Weave may store a part of a batch that it refuses as too large.
            return [
                answer for part in self._parted(batch, error) for answer in self.deliver(part, True)
            ]
        self._taken, self._failed_alone = batch[0], 0
        return delivery.answers()

    def _parted(self, batch: list[Record], error: Exception) -> list[list[Record]]:
        """Halve a batch; or split off single records as probes, if the server may be broken."""
        middle = len(batch) // 2
        if self._taken or not isinstance(error, Doubtful):
            return [batch[:middle], batch[middle:]]
        probes = sorted({0, middle, len(batch) - 1})
        rest = [record for place, record in enumerate(batch) if place not in probes]
        return [[batch[place]] for place in probes] + ([rest] if rest else [])

    def _note_failure(self, error: Exception) -> None:
        """Stop the upload if the server fails on every record, whatever is in it."""
        if not isinstance(error, Doubtful):
            return
        self._failed_alone += 1
        if self._failed_alone < PROBES:
            return
        if self._taken is None:
            found = f"took no record, and failed on {self._failed_alone} that were sent alone"
        elif not self._takes(self._taken):
            found = "stores nothing any more, not even what it took before"
        else:
            self._failed_alone = 0
            return
        raise TargetUnavailable(
            f"{self._target.uri} {found} ({error}): look into the server's log, then repeat the "
            "same upload"
        ) from error

    def _takes(self, record: Record) -> bool:
        """Send a record that is there once more, which changes nothing: is it taken?"""
        try:
            patiently(self._patience_s, self._ended)(self._target.send, [record])
        except (TargetRejected, TryAgain):
            return False
        return True


class _Delivery:
    """One batch, and what is known of its records after each attempt."""

    def __init__(self, target: Target, batch: list[Record], ask: bool) -> None:
        self._target = target
        self._batch = batch
        self.in_doubt = ask
        self._sent_bytes: dict[str, int] = {}
        self._replaced: set[str] = set()

    def attempt(self) -> None:
        absent = self._batch
        if self.in_doubt:
            found = self._target.find([record.entry for record in self._batch])
            absent = [record for record in self._batch if not found.get(record.entry.trace_id)]
            self._replaced |= {trace_id for trace_id, same in found.items() if not same}
        if not absent:
            return
        self._sent_bytes |= {record.entry.trace_id: record.size_bytes for record in absent}
        try:
            self._sent_bytes |= self._target.send(absent)
        except TryAgain:
            self.in_doubt = True
            raise

    def answers(self) -> list[Answer]:
        return [
            self._sent(record) if record.entry.trace_id in self._sent_bytes
            else Answer(record, Delivery.PRESENT)
            for record in self._batch
        ]  # fmt: skip

    def _sent(self, record: Record) -> Answer:
        trace_id = record.entry.trace_id
        replaces = trace_id in self._replaced
        sent_bytes = self._sent_bytes[trace_id]
        return Answer(record, Delivery.SENT, sent_bytes=sent_bytes, replaces=replaces)
