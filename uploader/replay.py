"""Send trajectories to a target, each exactly once: read, send, read back, remember.

One thread reads and maps records while a few others send them. Only a few batches wait in between,
so memory does not grow with the selection.

Records that the target holds according to the ledger are not sent. If a record's fate is unknown,
or if the target already holds anything of the run, the target is asked first. An upload can
therefore end at any point, by a crash, a timeout or a lost answer, and be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache
from threading import Event
from typing import TYPE_CHECKING

from localtrace.errors import TargetUnavailable
from localtrace.uploader.ledger import Ledger, State
from localtrace.uploader.limits import Limits, Pace
from localtrace.uploader.metrics import MetricsDelivery, run_metrics, send_metrics
from localtrace.uploader.parameters import parameters, send_parameters
from localtrace.uploader.progress import Tally
from localtrace.uploader.receipts import Delivery, RunReceipt
from localtrace.uploader.records import NOT_IN_STORE, Records
from localtrace.uploader.retry import patiently
from localtrace.uploader.selection import Choice, ChosenRun
from localtrace.uploader.sending import Answer, Sender
from localtrace.uploader.targets import (
    Entry,
    MetricsTarget,
    ParametersDelivery,
    Place,
    Record,
    Target,
)
from localtrace.uploader.targets.http import TryAgain

if TYPE_CHECKING:
    from localtrace.types import Run


class Replay:
    """One upload of chosen trajectories to a target that has been checked."""

    def __init__(self, records: Records, ledger: Ledger, limits: Limits, tally: Tally) -> None:
        self._records = records
        self._target: Target = records.target
        self._ledger = ledger
        self._limits = limits
        self._tally = tally
        self._taken_bytes = 0
        self._ended = Event()
        self._pace = Pace(limits.rate_bytes_per_s)
        self._sender = Sender(self._target, limits.patience_s, self._ended)
        self._patiently = patiently(limits.patience_s)

    def run(self, choice: Choice, container: str | None, *, metrics: bool) -> list[RunReceipt]:
        """Send a choice and read it back; the tally receives the result of each trajectory.

        Args:
            container: the experiment or project at the target; by default each run's project.
            metrics: send the runs' metrics and configurations too.

        Raises:
            TargetUnavailable: the target stopped answering; the same upload can go on later.
            UploadError: the target takes no records.
        """
        for trace_id in choice.unknown:
            self._tally.add(trace_id, Delivery.REJECTED, reason=NOT_IN_STORE)
        for trace_id, reason in choice.refused().items():
            self._tally.add(trace_id, Delivery.REJECTED, reason=reason)
        began_s = time.monotonic()
        try:
            runs = [self._run(part, container, metrics) for part in choice.runs]
        except TryAgain as error:
            raise TargetUnavailable(
                f"{self._target.uri} stopped answering after {self._tally.done} of "
                f"{self._tally.total} trajectories ({error}): repeat the same upload to go on"
            ) from error
        if sent := self._tally.count(Delivery.SENT):
            duration_s = time.monotonic() - began_s
            self._ledger.remember_speed(self._target.uri, sent, duration_s)
        return runs

    def _run(self, part: ChosenRun, container: str | None, metrics: bool) -> RunReceipt:
        with self._ledger.in_turn():
            place = self._patiently(self._target.place, part.run, container)
        self._ledger.remember_place(self._target.uri, container, part.run, place)
        there = self._send(part, place)
        if there and self._target.reads_back:
            self._verify(there)
        sent, known = MetricsDelivery(), ParametersDelivery()
        if metrics:
            sent = self._send_metrics(part.run, place)
            known = self._send_parameters(part.run, place)
        return RunReceipt(
            part.run.run_id,
            part.run.attempt,
            place.container or place.experiment,
            place,
            sent.counts,
            sent.names,
            "; ".join(filter(None, (sent.problem, known.problem))) or None,
            known.count,
            known.notes,
        )

    def _send(self, part: ChosenRun, place: Place) -> list[Entry]:
        """Send the missing trajectories of a run; return the entries that the target holds then."""

        def reject(trace_id: str, reason: str) -> None:
            self._ledger.mark([Entry(place, trace_id, "", "", 0)], State.REJECTED, reason)
            self._tally.add(trace_id, Delivery.REJECTED, reason=reason)

        there: list[Entry] = []
        is_empty = self._patiently(self._target.is_empty, place)
        starts_slowly = is_empty and self._target.starts_slowly

        def places(trace_ids: Sequence[str]) -> dict[str, Place]:
            return self._places(part.run, place, trace_ids, there, ask=not is_empty)

        # If the place is empty, the ledger's knowledge is about an earlier place of this name.
        believed = not (is_empty and self._target.reads_back)
        found = self._unknown(self._records.of(part, places, reject), there, believed)
        batches = self._batches(found, starts_slowly)
        self._deliver(batches, there, is_empty=is_empty, starts_slowly=starts_slowly)
        self._leave_out(part)
        return there

    def _deliver(
        self,
        batches: Iterable[tuple[list[Record], bool]],
        there: list[Entry],
        *,
        is_empty: bool,
        starts_slowly: bool,
    ) -> None:
        """Send batches with a few threads; add the accepted entries to `there`."""
        senders = self._target.connections
        waiting: set[Future[list[Answer]]] = set()
        with ThreadPoolExecutor(senders, thread_name_prefix="localtrace-upload") as pool:
            try:
                for batch, ask in batches:
                    self._pace.wait(sum(record.size_bytes for record in batch), self._ended)
                    self._ledger.mark([record.entry for record in batch], State.SENT)
                    deliver = self._sender.deliver
                    waiting.add(pool.submit(deliver, batch, ask or not is_empty))
                    # Usually the next batch is built while all senders are busy. With a slow start,
                    # the first batch must be answered before anything else is sent.
                    at_most = 0 if starts_slowly else senders
                    waiting = self._collect(waiting, there, at_most)
                    starts_slowly = False
                self._collect(waiting, there, at_most=0)
            except BaseException as error:
                self._ended.set()
                if not isinstance(error, Exception):
                    self._target.close()  # Ctrl-C does not wait for a server that hangs
                self._collect_the_rest(waiting, there)
                raise

    def _places(
        self, run: Run, place: Place, trace_ids: Sequence[str], there: list[Entry], *, ask: bool
    ) -> dict[str, Place]:
        """Return each trajectory's place, with the seed of the ids that it has there already."""
        places = self._ledger.places(place, trace_ids)
        known = {t: self._ledger.known(place.destination, t) for t in trace_ids}
        doubtful = [t for t, one in known.items() if one is None or not one.accepted]
        if not (ask and doubtful):
            return places
        for entry in self._patiently(self._target.recognise, place, run.run_id, doubtful).values():
            if entry.place.destination:
                places[entry.trace_id] = entry.place
            else:
                # It is there under ids that cannot be derived again, so it is never replaced.
                del places[entry.trace_id]
                there.append(entry)
                self._tally.add_entry(entry)
        return places

    def _unknown(
        self, found: Iterable[Record], there: list[Entry], believed: bool
    ) -> Iterator[tuple[Record, bool]]:
        """Drop records that the ledger knows to be there.

        Returns:
            Each other record, and whether the target must be asked for it before it is sent.
        """
        for record in found:
            entry = record.entry
            if believed and self._ledger.holds(entry):
                there.append(entry)
                self._tally.add_record(record, Delivery.PRESENT)
            else:
                known = self._ledger.known(entry.place.destination, entry.trace_id)
                yield record, known is not None

    def _batches(
        self, found: Iterable[tuple[Record, bool]], starts_slowly: bool
    ) -> Iterator[tuple[list[Record], bool]]:
        """Yield batches within the target's limits, and whether to ask before sending each."""
        batch: list[Record] = []
        size_bytes = parts = 0
        ask = False
        for record, doubt in self._within_limit(found):
            too_large = (
                size_bytes + record.size_bytes > self._batch_max_bytes
                or parts + len(record.parts) > self._target.batch_max_parts
            )
            if batch and (too_large or starts_slowly):
                yield batch, ask
                starts_slowly = False
                batch, size_bytes, parts, ask = [], 0, 0, False
            batch.append(record)
            size_bytes += record.size_bytes
            parts += len(record.parts)
            ask = ask or doubt
        if batch:
            yield batch, ask

    def _within_limit(self, found: Iterable[tuple[Record, bool]]) -> Iterator[tuple[Record, bool]]:
        limit = self._limits.max_bytes
        for record, doubt in found:
            if limit is not None and record.size_bytes > limit:
                reason = f"{record.size_bytes} bytes, and at most {limit} are to be sent"
                self._tally.add_record(record, Delivery.LEFT_OUT, reason)
                continue
            self._taken_bytes += record.size_bytes
            if limit is not None and self._taken_bytes > limit:
                return
            yield record, doubt

    @property
    def _batch_max_bytes(self) -> float:
        # A low rate also means small batches, so that every second keeps to it.
        return min(self._target.batch_max_bytes, self._limits.rate_bytes_per_s or float("inf"))

    def _collect(
        self, waiting: set[Future[list[Answer]]], there: list[Entry], at_most: int
    ) -> set[Future[list[Answer]]]:
        """Wait until at most `at_most` batches are under way; note the answers of the others."""
        while len(waiting) > at_most:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            failed = [future for future in done if future.exception() is not None]
            for future in done.difference(failed):
                self._note(future.result(), there)
            if failed:
                failed[0].result()
        return waiting

    def _collect_the_rest(self, waiting: set[Future[list[Answer]]], there: list[Entry]) -> None:
        """Note the answers that still arrived while the upload was failing."""
        for future in waiting:
            if not future.cancel() and future.exception() is None:
                self._note(future.result(), there)

    def _note(self, answers: list[Answer], there: list[Entry]) -> None:
        accepted = [a.record.entry for a in answers if a.delivery is not Delivery.REJECTED]
        there += accepted
        self._ledger.mark_each(
            (answer.record.entry, State.REJECTED, answer.reason)
            if answer.delivery is Delivery.REJECTED
            else (answer.record.entry, State.ACCEPTED, None)
            for answer in answers
        )
        for answer in answers:
            self._tally.add_answer(answer)

    def _leave_out(self, part: ChosenRun) -> None:
        limit = self._limits.max_bytes
        for trace_id in part.trace_ids:
            if not self._tally.has(trace_id):
                reason = f"at most {limit} bytes are sent at a time: repeat the upload to go on"
                self._tally.add(trace_id, Delivery.LEFT_OUT, reason=reason)

    def _verify(self, entries: list[Entry]) -> None:
        self._tally.tell(f"reading back from {self._target.uri}")
        found = self._patiently(self._target.verify, entries)
        self._tally.verified(found)
        doubles = self._patiently(self._target.double_rows, entries)
        if doubles is not None:
            self._tally.add_double_rows(doubles)
        missing = [e for e in entries if e.trace_id not in found and e.place.destination]
        self._ledger.mark(missing, State.MISSING, "not found when it was read back")

    def _send_metrics(self, run: Run, place: Place) -> MetricsDelivery:
        assert isinstance(self._target, MetricsTarget)
        safe = cache(self._records.redaction.text)  # names may hold keys too
        found = (
            replace(metric, name=safe(metric.name))
            for metric in run_metrics(self._records.store, run.run_id, run.attempt)
        )
        return send_metrics(found, self._target, place, self._patiently)

    def _send_parameters(self, run: Run, place: Place) -> ParametersDelivery:
        assert isinstance(self._target, MetricsTarget)
        found = parameters(run.config, self._records.redaction)
        return send_parameters(found, self._target, place, self._patiently)
