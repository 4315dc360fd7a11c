"""Receipts on this machine: list them, and put them back into the stores they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from localtrace.errors import QueryError, StoreError, UploadError
from localtrace.schema import UPLOADS
from localtrace.store.layout import open_layout, read_meta
from localtrace.store.receipts import UPLOAD_ID, put_receipt
from localtrace.uploader.receipt import Delivery, Receipt, RunReceipt, Size, is_complete
from localtrace.uploader.receipt_reading import contents, decoded, ended_at, read_receipt

if TYPE_CHECKING:
    import pyarrow as pa

    from localtrace.uploader.checking import Check

    Ask = Callable[[Receipt, Mapping[str, RunReceipt]], Check]
    from localtrace.read.store import Store

_NOT_THERE = "not found when the tracker was asked"
_RUNS_OF = """
select trace_id, run_id, attempt from all_trajectories
where trace_id in (select unnest($trace_ids))
"""


@dataclass(frozen=True, slots=True)
class Upload:
    """One upload in a list."""

    upload_id: str
    ended_at: datetime
    kind: str
    target: str
    containers: str
    """Names of the experiments or projects at the target."""
    selected: int
    sent: int
    already_there: int
    rejected: int
    verified: int | None
    """None if the target cannot be asked."""
    complete: bool


def list_uploads(folder: Path) -> tuple[list[Upload], list[str]]:
    """Return the uploads with receipts in a folder, newest first, and a line per broken file."""
    uploads, problems = [], []
    for path in folder.glob("*.json"):
        try:
            uploads.append(_upload(path))
        except UploadError as error:
            problems.append(str(error))
    return sorted(uploads, key=attrgetter("ended_at", "upload_id"), reverse=True), problems


def find_receipt(folder: Path, upload_id: str) -> Path:
    """Return the path of an upload's receipt.

    Raises:
        QueryError: the folder holds no receipt of this upload.
    """
    path = folder / f"{upload_id}.json"
    if not UPLOAD_ID.fullmatch(upload_id) or not path.is_file():
        raise QueryError(f"no upload is called {upload_id!r}: `localtrace uploads` lists them")
    return path


def bring(receipt: Receipt, path: Path, ask: Ask | None = None) -> Check | None:
    """Put a receipt into the store of its trajectories. Doing so twice changes nothing.

    Args:
        ask: function that asks the tracker, see `checking.check`. Without it, the receipt's own
            claims are stored, unless an earlier check has replaced them.

    Returns:
        The tracker's answer; None if it was not asked.

    Raises:
        StoreNotFound: there is no store at this path.
        StoreError: the receipt belongs to another store, or contradicts the one kept there.
        StoreUnwritable: the path is a bundle, or cannot be written.
    """
    from localtrace.read.store import open_store

    layout = open_layout(path)
    layout.refuse_bundle()
    with open_store(path) as store:
        runs = _runs_of(receipt, store)
    # Receipts of several stores name no store, but their trajectories do.
    if receipt.store_id != read_meta(layout).store_id and (receipt.store_id or not runs):
        raise StoreError(
            f"upload {receipt.upload_id} was made from another store than {layout.root}: from one "
            f"that was at {receipt.store}; name that with --store"
        )
    kept = layout.receipts / f"{receipt.upload_id}.json"
    if kept.exists() and read_receipt(kept) != receipt:
        raise StoreError(
            f"{kept} says something else of the same upload: find out which of the two is right, "
            "and remove that file if it is the new one"
        )
    if ask is None and kept.exists() and kept.with_suffix(".parquet").exists():
        return None
    checked = ask(receipt, _with_the_only_run(receipt, runs)) if ask else None
    rows = rows_of(receipt, runs, checked)
    put_receipt(layout, receipt.upload_id, receipt.to_json(), rows)
    return checked


def rows_of(
    receipt: Receipt, runs: Mapping[str, RunReceipt], checked: Check | None = None
) -> pa.Table:
    """Convert a receipt to rows of the view `uploads`.

    Args:
        runs: the run of each trajectory, by trace id. A receipt of several runs does not say it.
        checked: the tracker's answer. Rows of trajectories that it was not asked about hold the
            receipt's own claims.
    """
    import pyarrow as pa

    traces = receipt.traces
    claimed = receipt.failures
    asked = checked.asked if checked else frozenset()
    present = checked.present if checked else frozenset()
    runs = _with_the_only_run(receipt, runs)
    places = [runs.get(trace.trace_id) for trace in traces]
    columns = {
        "upload_id": [receipt.upload_id] * len(traces),
        "trace_id": [trace.trace_id for trace in traces],
        "kind": [receipt.kind] * len(traces),
        "target": [receipt.target] * len(traces),
        "container": [run and run.container for run in places],
        "run": [(run and run.place.run) or None for run in places],
        "remote_id": [trace.remote_id for trace in traces],
        "state": [trace.delivery.value for trace in traces],
        "verified": [
            trace.trace_id in present if trace.trace_id in asked else trace.verified
            for trace in traces
        ],
        "checked_at": [
            checked.checked_at if checked and trace.trace_id in asked else None for trace in traces
        ],
        "reason": [
            (None if trace.trace_id in present else _NOT_THERE)
            if trace.trace_id in asked
            else claimed.get(trace.trace_id, trace.reason)
            for trace in traces
        ],
        "digest": [trace.digest for trace in traces],
        "size_bytes": [trace.size_bytes for trace in traces],
        "uploaded_at": [ended_at(receipt)] * len(traces),
    }
    return pa.table(columns, schema=UPLOADS.arrow()).sort_by("trace_id")


def _with_the_only_run(
    receipt: Receipt, runs: Mapping[str, RunReceipt]
) -> Mapping[str, RunReceipt]:
    """Add the trajectories whose run follows from the receipt, because it has no other."""
    if len(receipt.runs) != 1:
        return runs
    return {trace.trace_id: receipt.runs[0] for trace in receipt.traces} | dict(runs)


def _runs_of(receipt: Receipt, store: Store) -> dict[str, RunReceipt]:
    """Look up the runs of a receipt's trajectories in the store, by trace id."""
    runs = {(run.run_id, run.attempt): run for run in receipt.runs}
    trace_ids = [trace.trace_id for trace in receipt.traces]
    found = store.own_sql(_RUNS_OF, {"trace_ids": trace_ids}).to_dicts()
    keys = {row["trace_id"]: (row["run_id"], row["attempt"]) for row in found}
    return {trace_id: runs[key] for trace_id, key in keys.items() if key in runs}


class _Run(msgspec.Struct):
    container: str
    metrics_problem: str | None = None


class _Summary(msgspec.Struct):
    """The fields of a receipt that a list shows. Its trajectories are skipped, not decoded."""

    upload_id: str
    ended_at: datetime
    target: str
    counts: dict[str, Size]
    runs: list[_Run]
    kind: str
    reads_back: bool = True


def _upload(path: Path) -> Upload:
    found = decoded(path, contents(path), _Summary)
    containers = {run.container for run in found.runs}
    counts = found.counts
    return Upload(
        upload_id=found.upload_id,
        ended_at=found.ended_at.astimezone(UTC),
        kind=found.kind,
        target=found.target,
        containers=", ".join(sorted(containers)),
        selected=counts.get("selected", 0),
        sent=counts.get(Delivery.SENT, 0),
        already_there=counts.get(Delivery.PRESENT, 0),
        rejected=counts.get(Delivery.REJECTED, 0),
        verified=counts.get("verified", 0) if found.reads_back else None,
        complete=is_complete(counts, found.reads_back)
        and not any(run.metrics_problem for run in found.runs),
    )
