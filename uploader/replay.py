"""Send trajectories to a target, each exactly once: plan, send, read back, remember.

One thread plans while a few others send. Only a few batches wait in between, so memory does not
grow with the selection.

Records that the target holds according to the ledger are not sent. If a record's fate is unknown,
or if the target already holds anything of the run, the target is asked first. An upload can
therefore end at any point, by a crash, a timeout or a lost answer, and be repeated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from threading import Event

from msgspec.structs import replace

from localtrace.errors import ConfigError, TargetUnavailable
from localtrace.store.files import explained
from localtrace.uploader.ledger import Ledger, State
from localtrace.uploader.metrics import send_metrics
from localtrace.uploader.plan import Limits, Plan, Progress, Records, Skip
from localtrace.uploader.receipts import (
    Delivery,
    Receipt,
    RunReceipt,
    TraceReceipt,
    count,
    new_upload_id,
    write_receipt,
)
from localtrace.uploader.retry import Pace, patiently
from localtrace.uploader.selection import NOT_IN_STORE, Choice, ChosenRun
from localtrace.uploader.sending import Answer, Sender
from localtrace.uploader.state import REMEDY, receipts_folder, state_folder
from localtrace.uploader.targets import Entry, MetricsTarget, Place, Target
from localtrace.uploader.targets.http import TryAgain


def transfer(
    choice: Choice,
    records: Records,
    limits: Limits,
    container: str | None,
    *,
    metrics: bool,
    on_progress: Callable[[Progress], None],
) -> Receipt:
    """Send a choice to the target of `records`, close the target, and write the receipt.

    Arguments and errors are those of `localtrace.uploader.upload`.
    """
    started_at = _now()
    store, target, redaction = records.store, records.target, records.redaction
    if metrics and not isinstance(target, MetricsTarget):
        raise ConfigError(
            f"{target.kind} takes no metrics: leave them out, or upload them to mlflow"
        )
    tally = Tally(choice.total, on_progress)
    with closing(Ledger(state_folder())) as ledger, ledger.claim(target.uri), closing(target):
        if target.opening:
            tally.tell(target.opening)
        target.check()
        runs = Replay(records, ledger, limits, tally).run(choice, container, metrics=metrics)
    receipt = Receipt(
        upload_id=new_upload_id(),
        store=", ".join(map(str, store.paths)),
        store_id=store.store_id or "",
        selection=choice.text,
        kind=target.kind,
        target=target.uri,
        started_at=started_at,
        ended_at=_now(),
        runs=runs,
        traces=[*tally.results.values()],
        counts=count([*tally.results.values()]),
        left_out=dict(records.left_out),
        redactions=dict(redaction.counts),
        unsearched=dict(redaction.unsearched),
        reads_back=target.reads_back,
        double_rows=tally.double_rows,
    )
    with explained(f"cannot write {receipts_folder()}", f"{REMEDY}: nothing is sent twice"):
        write_receipt(receipt, receipts_folder())
    return receipt


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Tally:
    """The results by trajectory; each new one is reported as progress."""

    def __init__(self, total: int, on_progress: Callable[[Progress], None]) -> None:
        self.total = total
        self._on_progress = on_progress
        self._sent_bytes = 0
        self.results: dict[str, TraceReceipt] = {}
        """All results by trace id, in the order of arrival."""
        self.double_rows: int | None = None
        """Rows that the target shows beyond one per call; None if it was not asked."""

    def add(self, result: TraceReceipt) -> None:
        """Add the result of a trajectory."""
        self.results[result.trace_id] = result
        self._sent_bytes += result.sent_bytes or 0
        self.tell()

    def tell(self, doing: str = "") -> None:
        """Report the progress, and what the upload waits for now."""
        self._on_progress(Progress(len(self.results), self.total, self._sent_bytes, doing))


class Replay:
    """One upload of chosen trajectories to a target that has been checked."""

    def __init__(self, records: Records, ledger: Ledger, limits: Limits, tally: Tally) -> None:
        self._records = records
        self._target: Target = records.target
        self._ledger = ledger
        self._limits = limits
        self._tally = tally
        self._planned_bytes = 0
        self._sent = 0
        self._ended = Event()
        self._pace = Pace(limits.rate_bytes_per_s)
        self._sender = Sender(self._target, limits.patience_s, self._ended)
        self._patiently = patiently(limits.patience_s)

    def run(self, choice: Choice, container: str | None, *, metrics: bool) -> list[RunReceipt]:
        """Send a choice and read it back; the tally receives the result of each trajectory.

        Args:
            choice: the runs and their trajectories.
            container: the experiment or project at the target; by default each run's project.
            metrics: send the runs' metrics and configurations too.

        Raises:
            TargetUnavailable: the target stopped answering; the same upload can go on later.
            UploadError: the target takes no records.
        """
        for trace_id in choice.unknown:
            self._tally.add(TraceReceipt(trace_id, Delivery.REJECTED, reason=NOT_IN_STORE))
        began_s = time.monotonic()
        try:
            runs = [self._run(part, container, metrics) for part in choice.runs]
        except TryAgain as error:
            raise TargetUnavailable(
                f"{self._target.uri} stopped answering after {len(self._tally.results)} of "
                f"{self._tally.total} trajectories ({error}): repeat the same upload to go on"
            ) from error
        if self._sent:
            self._ledger.remember_speed(self._target.uri, self._sent, time.monotonic() - began_s)
        return runs

    def _run(self, part: ChosenRun, container: str | None, metrics: bool) -> RunReceipt:
        run, target = part.run, self._target
        place = self._patiently(target.place, run, container)
        self._ledger.remember_place(target.uri, container, run, place)
        there = self._send(part, place)
        if there and target.reads_back:
            self._verify(there)
        receipt = RunReceipt(run.run_id, run.attempt, place.container or place.experiment, place)
        if metrics and isinstance(target, MetricsTarget):
            store, redaction = self._records.store, self._records.redaction
            return send_metrics(receipt, run, store, redaction, target, self._patiently)
        return receipt

    def _send(self, part: ChosenRun, place: Place) -> list[Entry]:
        """Send the missing trajectories of a run; return the entries that the target holds then."""
        target = self._target
        is_empty = self._patiently(target.is_empty, place)
        recognise = partial(self._patiently, target.recognise, place, part.run.run_id)
        plan = Plan(
            self._records,
            self._ledger,
            self._limits,
            part,
            place,
            planned_bytes=self._planned_bytes,
            is_empty=is_empty,
            recognise=None if is_empty else recognise,
        )
        there: list[Entry] = []
        waiting: deque[Future[list[Answer]]] = deque()
        must_wait = is_empty and target.starts_slowly
        with ThreadPoolExecutor(target.connections, "localtrace-upload") as pool:
            try:
                for step in plan.steps():
                    if isinstance(step, Skip):
                        self._tally.add(step.receipt)
                        there += [] if step.entry is None else [step.entry]
                        continue
                    self._planned_bytes += step.size_bytes
                    self._pace.wait(step.size_bytes, self._ended)
                    self._ledger.mark([record.entry for record in step.records], State.SENT)
                    waiting.append(pool.submit(self._sender.deliver, step))
                    # Usually the next batch is built while all senders are busy. With a slow start,
                    # the first batch must be answered before anything else is sent.
                    while len(waiting) > (0 if must_wait else target.connections):
                        self._note(waiting.popleft().result(), there)
                    must_wait = False
                while waiting:
                    self._note(waiting.popleft().result(), there)
            except BaseException:
                self._ended.set()
                target.close()  # so that Ctrl-C does not wait for a server that hangs
                for future in waiting:
                    if not future.cancel() and future.exception() is None:
                        self._note(future.result(), there)
                raise
        return there

    def _note(self, answers: list[Answer], there: list[Entry]) -> None:
        accepted = [e for e, receipt in answers if receipt.delivery is not Delivery.REJECTED]
        self._ledger.mark(accepted, State.ACCEPTED)
        there += accepted
        for entry, receipt in answers:
            if receipt.delivery is Delivery.REJECTED:
                self._ledger.mark([entry], State.REJECTED, receipt.reason)
            self._sent += receipt.delivery is Delivery.SENT
            self._tally.add(receipt)

    def _verify(self, entries: list[Entry]) -> None:
        self._tally.tell(f"reading back from {self._target.uri}")
        found = self._patiently(self._target.verify, entries)
        results = self._tally.results
        results |= {trace_id: replace(results[trace_id], verified=True) for trace_id in found}
        doubles = self._patiently(self._target.double_rows, entries)
        if doubles is not None:
            self._tally.double_rows = (self._tally.double_rows or 0) + doubles
        missing = [e for e in entries if e.trace_id not in found and e.place.destination]
        self._ledger.mark(missing, State.MISSING, "not found when it was read back")
