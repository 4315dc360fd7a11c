"""One upload from beginning to end: check the target, replay the choice, write the receipt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime

from localtrace.errors import ConfigError
from localtrace.uploader.ledger import Ledger
from localtrace.uploader.limits import Limits
from localtrace.uploader.progress import Progress, Tally
from localtrace.uploader.receipts import (
    Receipt,
    RunReceipt,
    count,
    new_upload_id,
    write_receipt,
)
from localtrace.uploader.records import Records
from localtrace.uploader.replay import Replay
from localtrace.uploader.selection import Choice
from localtrace.uploader.state import receipts_folder, state_folder, writing
from localtrace.uploader.targets import MetricsTarget


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
    target = records.target
    if metrics and not isinstance(target, MetricsTarget):
        raise ConfigError(
            f"{target.kind} takes no metrics: leave them out, or upload them to mlflow"
        )
    tally = Tally(len(choice.trace_ids) + len(choice.unknown), on_progress)
    with closing(Ledger(state_folder())) as ledger, ledger.claim(target.uri), closing(target):
        if target.opening:
            tally.tell(target.opening)
        target.check()
        replay = Replay(records, ledger, limits, tally)
        runs = replay.run(choice, container, metrics=metrics)
    receipt = _receipt(started_at, choice, records, runs, tally)
    with writing(receipts_folder()) as folder:
        write_receipt(receipt, folder)
    return receipt


def _receipt(
    started_at: str, choice: Choice, records: Records, runs: list[RunReceipt], tally: Tally
) -> Receipt:
    store, target, redaction = records.store, records.target, records.redaction
    return Receipt(
        upload_id=new_upload_id(),
        store=", ".join(map(str, store.paths)),
        store_id=store.store_id or "",
        selection=choice.text,
        kind=target.kind,
        target=target.uri,
        started_at=started_at,
        ended_at=_now(),
        runs=runs,
        traces=tally.results,
        counts=count(tally.results),
        left_out=dict(records.left_out),
        redactions=dict(redaction.counts),
        unsearched=dict(redaction.unsearched),
        reads_back=target.reads_back,
        double_rows=tally.double_rows,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
