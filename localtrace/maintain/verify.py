"""Checks of a store from the first byte to the last, and repairs after a crash."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from localtrace.errors import StoreError
from localtrace.schema import ROW_IDENTITIES, TABLES, TableSchema
from localtrace.store.compacting.damaged import lost_files
from localtrace.store.files import open_file, passed_over
from localtrace.store.journal.folders import find_journal_folders
from localtrace.store.journal.frames import read_frames
from localtrace.store.journal.journal_files import list_journals, read_journal, strangers
from localtrace.store.layout import StoreLayout
from localtrace.store.receipts import receipt_tables
from localtrace.store.sealing.seal import SealReport, seal
from localtrace.store.tables.delta import CommittedFile, committed_files, open_table
from localtrace.store.tables.log_repair import heal_log, torn_log_entry
from localtrace.store.tables.replacing import replaced_files
from localtrace.store.tables.snapshot import take_snapshot

_ORPHAN_MIN_AGE_S = 3600.0
_RESTORE = "restore it from a copy of the store"
_FILE_NAME = re.compile(r"^v\d+-[0-9a-f]{32}\.parquet$")


@dataclass(slots=True)
class VerifyReport:
    """The counts and findings of `verify`."""

    files: int = 0
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))
    """Readable rows by table, in files and in journals that are not sealed."""
    journals: int = 0
    quarantined: int = 0
    problems: list[str] = field(default_factory=list)
    """Problems found, each with its place and what to do about it."""
    foreign: list[str] = field(default_factory=list)
    """Folders with journals of another store; a copied store finds those of its original."""


def verify(layout: StoreLayout, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Check every file and journal of a store. Writes nothing.

    Args:
        progress: called with files done and files known.
    """
    report = VerifyReport()
    states = {name: _state(layout, schema, report) for name, schema in TABLES.items()}
    for name, count in _unsealed_rows(layout).items():
        report.rows[name] += count
    total = sum(len(files) for files in states.values())
    for name, files in states.items():
        _verify_table(layout, TABLES[name], files, report, lambda: _tell(progress, report, total))
    folders = find_journal_folders(layout)
    report.foreign = folders.foreign
    for folder in folders.own:
        report.problems += [passed_over(path) for path in strangers(folder)]
    for file, status in list_journals(folders.own):
        report.journals += 1
        with contextlib.suppress(FileNotFoundError):  # sealed meanwhile
            frames = read_frames(read_journal(file), file.name.marker)
            if frames.damaged:
                report.problems.append(
                    f"{file.path}: {len(frames.damaged)} damaged places; the rest is readable "
                    "(run localtrace recover)"
                )
            if frames.tail_start is not None and status.is_ready:
                report.problems.append(
                    f"{file.path}: its last record is unfinished, its process died while writing "
                    "(run localtrace seal)"
                )
    again = "remove it, and bring the receipt beside it again (localtrace uploads --bring)"
    _verify_readable(map(Path, receipt_tables(layout)), again, report)
    report.quarantined = len(list(layout.quarantine.glob("*")))
    for orphan in orphans(layout, states):
        report.problems.append(f"{orphan}: belongs to no table state (run localtrace recover)")
    return report


def _verify_readable(paths: Iterable[Path], remedy: str, report: VerifyReport) -> None:
    for path in paths:
        report.files += 1
        try:
            os.close(open_file(path))
            pq.read_table(path)
        except FileNotFoundError:
            continue
        except (OSError, pa.ArrowException) as error:
            report.problems.append(f"{path}: {error}; {remedy}")


def _tell(progress: Callable[[int, int], None] | None, report: VerifyReport, total: int) -> None:
    report.files += 1
    if progress is not None:
        progress(report.files, total)


def _state(layout: StoreLayout, schema: TableSchema, report: VerifyReport) -> list[CommittedFile]:
    if torn := torn_log_entry(layout, schema):
        report.problems.append(f"{torn}: this log entry is torn (run localtrace recover)")
    try:
        return committed_files(open_table(layout, schema))
    except StoreError as error:
        report.problems.append(str(error))
        return []


def _unsealed_rows(layout: StoreLayout) -> dict[str, int]:
    try:
        pending = take_snapshot(layout).pending
    except StoreError:
        return {}  # the check of each table reports what is wrong
    return {name: rows.num_rows for name, rows in pending.items()}


def _verify_table(
    layout: StoreLayout,
    schema: TableSchema,
    files: list[CommittedFile],
    report: VerifyReport,
    done: Callable[[], None],
) -> None:
    identities, missing = [], []
    for committed in files:
        place = committed.place(layout, schema)
        try:
            os.close(open_file(place))  # raises for a pipe, for which opening would wait
            size_bytes = place.stat().st_size
            if size_bytes != committed.size_bytes:
                raise StoreError(f"it has {size_bytes} bytes instead of {committed.size_bytes}")
            rows = 0
            with pq.ParquetFile(place) as file:
                for batch in file.iter_batches():
                    rows += len(batch)
                    identities.append(batch.select(ROW_IDENTITIES[schema.name]))
            if committed.rows is not None and rows != committed.rows:
                raise StoreError(f"it has {rows} rows instead of {committed.rows}")
            report.rows[schema.name] += rows
        except FileNotFoundError:
            missing.append(committed)
        except (OSError, pa.ArrowException) as error:
            report.problems.append(f"{place}: {error}; {_RESTORE}")
        done()
    for lost in lost_files(layout, schema, missing):
        report.problems.append(f"{lost.place(layout, schema)}: it is missing; {_RESTORE}")
    if schema.name in ("spans", "trajectories") and identities:
        doubled = _doubled(pa.Table.from_batches(identities))
        if doubled:
            report.problems.append(
                f"table {schema.name}: {doubled} records are there twice; please report this"
            )


def _doubled(identities: pa.Table) -> int:
    counts = identities.group_by(identities.column_names).aggregate([([], "count_all")])
    return int(pc.sum(pc.greater(counts["count_all"], 1)).as_py() or 0)


def orphans(layout: StoreLayout, states: Mapping[str, Sequence[CommittedFile]]) -> list[Path]:
    """Return Parquet files that no table knows, too old to belong to a commit under way."""
    found = []
    for name, files in states.items():
        known = {file.place(layout, TABLES[name]) for file in files}
        with contextlib.suppress(StoreError):  # the check of the table reports it
            known |= replaced_files(layout, TABLES[name])
        for path in layout.table(name).rglob("v*.parquet"):
            if not _FILE_NAME.match(path.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                old = time.time() - path.stat().st_mtime > _ORPHAN_MIN_AGE_S
                if old and path not in known:
                    found.append(path)
    return sorted(found)


@dataclass(slots=True)
class RecoverReport:
    """The repairs of `recover`."""

    healed: int = 0
    """Torn log entries moved to quarantine."""
    orphans: int = 0
    """Files of unfinished commits moved to quarantine."""
    sealed: SealReport = field(default_factory=SealReport)
    problems: list[str] = field(default_factory=list)


def recover(
    layout: StoreLayout,
    *,
    wait_s: float = 60.0,
    progress: Callable[[int, int], None] | None = None,
) -> RecoverReport:
    """Heal torn tables, seal journals of dead processes, and move unfinished files away.

    Only journals that were sealed are deleted. All other files go to the quarantine folder.

    Raises:
        StoreError: another sealer was at work for longer than `wait_s`.
    """
    layout.refuse_bundle()
    report = RecoverReport()
    for schema in TABLES.values():
        report.problems += heal_log(layout, schema)
    report.healed = len(report.problems)
    report.sealed = seal(layout, wait_s=wait_s, progress=progress)
    report.problems += report.sealed.problems
    states = {name: committed_files(open_table(layout, schema)) for name, schema in TABLES.items()}
    report.orphans = _put_aside(layout, orphans(layout, states))
    return report


def _put_aside(layout: StoreLayout, paths: Iterable[Path]) -> int:
    count = 0
    for path in paths:
        layout.quarantine.mkdir(exist_ok=True)
        os.replace(path, layout.quarantine / path.name)
        count += 1
    return count
