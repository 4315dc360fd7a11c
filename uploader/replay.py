"""Send, verify, record: bring records to a target, each exactly once.

Asking comes before every send: what the target holds already, by id and digest, is not sent, and
neither is what the ledger knows to be there. So an upload can be cut off at any point, by a crash,
a timeout or a lost answer, and be repeated. A record that the target refuses is found by halving
its batch, and the rest goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localtrace.errors import TargetRejected, TargetUnavailable
from localtrace.uploader.ledger import Ledger, State
from localtrace.uploader.patience import patiently
from localtrace.uploader.receipt import (
    Delivery,
    Receipt,
    RunReceipt,
    TraceReceipt,
    count,
    new_upload_id,
    now,
)
from localtrace.uploader.records import NOT_IN_STORE, records
from localtrace.uploader.selection import Choice, ChosenRun
from localtrace.uploader.targets import Entry, Place, Record, Target
from localtrace.uploader.targets.http import Doubtful, TryAgain

if TYPE_CHECKING:
    from localtrace.reader import Store


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an upload is."""

    done: int
    """Trajectories that were sent, were there already, or were rejected."""
    total: int
    sent_bytes: int


class Replay:
    """One upload: a choice of trajectories on its way to a checked target."""

    def __init__(
        self,
        store: Store,
        choice: Choice,
        target: Target,
        ledger: Ledger,
        patience_s: float,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._store = store
        self._choice = choice
        self._target = target
        self._ledger = ledger
        self._patiently = patiently(patience_s)
        self._on_progress = on_progress
        self._results: dict[str, TraceReceipt] = {}
        self._sent: set[str] = set()
        self._sent_bytes = 0

    def run(self, experiment: str | None) -> Receipt:
        """Send, read back, and say what is there.

        Args:
            experiment: its name at the target; by default the project of each run.

        Raises:
            TargetUnavailable: the target stopped answering; the same upload can go on later.
            UploadError: the target can take no record.
        """
        started_at = now()
        runs = []
        for trace_id in self._choice.unknown:
            self._record(TraceReceipt(trace_id, Delivery.REJECTED, reason=NOT_IN_STORE))
        try:
            for part in self._choice.runs:
                name = experiment or part.run.project
                place = self._patiently(self._target.place, part.run, name)
                self._replay_run(part, place)
                runs.append(RunReceipt(part.run.run_id, part.run.attempt, name, place))
        except TryAgain as error:
            raise TargetUnavailable(
                f"{self._target.uri} stopped answering after {len(self._results)} of "
                f"{self._total} trajectories ({error}): repeat the same upload to go on"
            ) from error
        traces = list(self._results.values())
        return Receipt(
            upload_id=new_upload_id(),
            store=str(self._store.path),
            selection=self._choice.text,
            target=self._target.uri,
            started_at=started_at,
            ended_at=now(),
            runs=runs,
            traces=traces,
            counts=count(traces),
        )

    @property
    def _total(self) -> int:
        return sum(len(part.trace_ids) for part in self._choice.runs) + len(self._choice.unknown)

    def _replay_run(self, part: ChosenRun, place: Place) -> None:
        there: list[Entry] = []

        def reject(trace_id: str, reason: str) -> None:
            self._reject(Entry(place, trace_id, "", "", None), reason)

        found = records(self._store, self._target, part.trace_ids, place, reject)
        for batch in self._batches(self._unknown(found, there)):
            entries = [record.entry for record in batch]
            self._ledger.mark(entries, State.SENT)
            there += self._deliver(batch)
        self._verify(there)

    def _unknown(self, found: Iterable[Record], there: list[Entry]) -> Iterator[Record]:
        """Leave out what the ledger knows to be at the target, and note it in `there`."""
        for record in found:
            entry = record.entry
            known = self._ledger.accepted_digest(entry.place.destination, entry.trace_id)
            if known == entry.digest:
                there.append(entry)
                self._note(record, Delivery.PRESENT)
            else:
                yield record

    def _batches(self, found: Iterable[Record]) -> Iterator[list[Record]]:
        batch: list[Record] = []
        size_bytes = 0
        for record in found:
            too_large = size_bytes + record.size_bytes > self._target.batch_max_bytes
            if batch and (too_large or len(batch) == self._target.batch_max_records):
                yield batch
                batch, size_bytes = [], 0
            batch.append(record)
            size_bytes += record.size_bytes
        if batch:
            yield batch

    def _deliver(self, batch: list[Record]) -> list[Entry]:
        """Bring a batch to the target; return the entries that it holds."""
        try:
            self._patiently(self._send_absent, batch)
        except (TargetRejected, Doubtful) as error:
            if len(batch) == 1:
                self._reject(batch[0].entry, str(error))
                return []
            middle = len(batch) // 2
            return self._deliver(batch[:middle]) + self._deliver(batch[middle:])
        entries = [record.entry for record in batch]
        self._ledger.mark(entries, State.ACCEPTED)
        for record in batch:
            sent = record.entry.trace_id in self._sent
            self._note(record, Delivery.SENT if sent else Delivery.PRESENT)
        return entries

    def _send_absent(self, batch: list[Record]) -> None:
        there = self._target.complete([record.entry for record in batch])
        absent = [record for record in batch if record.entry.trace_id not in there]
        if absent:
            self._sent.update(record.entry.trace_id for record in absent)
            self._target.send(absent)

    def _verify(self, entries: list[Entry]) -> None:
        if not entries:
            return
        found = self._patiently(self._target.verify, entries)
        for trace_id in found:
            self._results[trace_id] = replace(self._results[trace_id], verified=True)
        missing = [entry for entry in entries if entry.trace_id not in found]
        self._ledger.mark(missing, State.MISSING, "not found when it was read back")

    def _reject(self, entry: Entry, reason: str) -> None:
        self._ledger.mark([entry], State.REJECTED, reason)
        self._record(TraceReceipt(entry.trace_id, Delivery.REJECTED, reason=reason))

    def _note(self, record: Record, delivery: Delivery) -> None:
        entry = record.entry
        self._record(
            TraceReceipt(entry.trace_id, delivery, entry.remote_id, entry.digest, record.size_bytes)
        )

    def _record(self, result: TraceReceipt) -> None:
        self._results[result.trace_id] = result
        if result.delivery is Delivery.SENT:
            self._sent_bytes += result.size_bytes
        self._on_progress(Progress(len(self._results), self._total, self._sent_bytes))
