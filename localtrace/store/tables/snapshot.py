"""One consistent look at a store: sealed files, and the rows of journals that are not sealed yet.

The order matters beside a running sealer: (1) open every journal and fix its length, (2) read each
table's newest state, outcomes first, (3) per table leave out the journals that this state already
covers. Nothing here writes.

Where a store is read in several copies and bundles at once, the SQL views leave out the doubles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import pyarrow as pa
from deltalake import DeltaTable

from localtrace.schema import OUTCOMES, TABLES
from localtrace.store.bundle import Bag
from localtrace.store.journal.folders import journal_folders
from localtrace.store.journal.frames import Frames, read_frames
from localtrace.store.journal.journal_files import (
    JournalFile,
    JournalName,
    JournalStatus,
    list_journals,
    read_journal,
)
from localtrace.store.layout import StoreLayout
from localtrace.store.receipts import receipt_tables
from localtrace.store.tables.damage import Damage
from localtrace.store.tables.delta import committed_number, open_table, table_files
from localtrace.store.tokenizers import Decode, RunTokenizers

_LISTINGS_MAX = 50


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The content of a store at one moment."""

    files: dict[str, list[str]]
    """Absolute paths of sealed Parquet files by table."""
    pending: dict[str, pa.Table]
    """Rows of journals that are not sealed, by table."""
    pending_journals: int
    damage: Damage
    """Counts of what could not be read in the journals that are not sealed."""
    receipts: tuple[str, ...] = ()
    """Absolute paths of the Parquet files of receipts."""
    partitioned: bool = True
    """True where the files' paths hold the partition columns; False where the files do."""

    def paths(self) -> Iterator[str]:
        """Yield the paths of all files that are read."""
        return chain(*self.files.values(), self.receipts)

    def rows(self, table: str, columns: list[str]) -> list[dict[str, Any]]:
        """Return all rows of a small table without partitions."""
        import pyarrow.parquet as pq  # slow to import, and most readers do without

        tables = [self.pending[table].select(columns)]
        for path in self.files[table]:
            with pq.ParquetFile(path) as file:
                tables.append(file.read(columns))  # those that its format version knew
        return [
            {name: row.get(name) for name in columns} for part in tables for row in part.to_pylist()
        ]


Copies: TypeAlias = Sequence[Snapshot]
"""Snapshots of one store: usually one, several where it is read in copies and bundles."""


@dataclass(frozen=True, slots=True)
class OpenJournal:
    """The bytes of a journal up to the length it had when it was opened."""

    file: JournalFile
    data: bytes
    status: JournalStatus

    def frames(self) -> Frames:
        """Split the bytes into frames."""
        return read_frames(self.data, self.file.name.marker)


def take_snapshot(layout: StoreLayout) -> Snapshot:
    """Look at a store once.

    Raises:
        StoreError: a journal folder or a table cannot be read.
    """
    if layout.bags:
        return _bundled(layout.bags)
    journals = open_journals(layout)
    tables = _open_tables(layout)
    files = {name: table_files(layout, tables[name], table) for name, table in TABLES.items()}
    left = uncommitted_rows(journals, tables, RunTokenizers(layout).decode)
    names = frozenset[JournalName]().union(*(part.journals for part in left.values()))
    damage = max((part.damage for part in left.values()), key=lambda damage: damage.records)
    pending = {name: part.tables[name] for name, part in left.items()}
    return Snapshot(files, pending, len(names), damage, receipt_tables(layout))


def _open_tables(layout: StoreLayout) -> dict[str, DeltaTable | None]:
    # Folding gives trajectories their values before it moves the outcomes. Opened in the other
    # order, a value is seen at least once.
    outcomes = open_table(layout, OUTCOMES)
    others = [table for table in TABLES.values() if table is not OUTCOMES]
    with ThreadPoolExecutor(len(others)) as pool:  # each mostly waits for the disk
        opened = pool.map(partial(open_table, layout), others)
        names = [table.name for table in others]
        return {OUTCOMES.name: outcomes, **dict(zip(names, opened, strict=True))}


def _bundled(bags: Sequence[Bag]) -> Snapshot:
    files = {}
    for table in TABLES:
        # Parts hold the same runs and metrics, in files of the same names, which tell the content.
        paths = {path.name: str(path) for bag in bags for path in bag.table_files(table)}
        files[table] = list(paths.values())
    pending = {name: schema.no_rows() for name, schema in TABLES.items()}
    return Snapshot(files, pending, 0, Damage(), partitioned=False)


@dataclass(frozen=True, slots=True)
class Uncommitted:
    """The rows of journals that the committed state of a table lacks."""

    tables: dict[str, pa.Table]
    journals: frozenset[JournalName]
    unreadable: frozenset[JournalName]
    """Journals of which a part cannot be read."""
    damage: Damage


def uncommitted_rows(
    journals: Sequence[OpenJournal], tables: Mapping[str, DeltaTable | None], decode: Decode
) -> dict[str, Uncommitted]:
    """Make, for each table, the rows of the journals that it does not cover yet.

    Tables usually lack the same journals. They differ only after a sealer died between two
    commits.
    """
    read: dict[frozenset[JournalName], Uncommitted] = {}
    result = {}
    for name, table in tables.items():
        left = [
            journal
            for journal in journals
            if journal.file.name.number > committed_number(table, journal.file.name.writer_id)
        ]
        names = frozenset(journal.file.name for journal in left)
        if names not in read:
            read[names] = _rows(left, names, decode)
        result[name] = read[names]
    return result


def _rows(
    journals: Sequence[OpenJournal], names: frozenset[JournalName], decode: Decode
) -> Uncommitted:
    if not journals:
        tables = {name: schema.no_rows() for name, schema in TABLES.items()}
        return Uncommitted(tables, names, names, Damage())
    # Slow to import, and a reader of a store where all is sealed does without.
    from localtrace.store.tables.rows import JournalRows

    rows = JournalRows(decode)
    for journal in journals:
        rows.add_journal(journal.file.name, journal.frames(), journal.status)
    tables = rows.tables()
    return Uncommitted(tables, names, frozenset(rows.unreadable), rows.damage)


def open_journals(layout: StoreLayout) -> list[OpenJournal]:
    """Read every journal; list again when one vanished or was renamed meanwhile."""
    journals: list[OpenJournal] = []
    for _ in range(_LISTINGS_MAX):
        files = list_journals(journal_folders(layout))
        try:
            journals = [OpenJournal(file, read_journal(file), status) for file, status in files]
        except FileNotFoundError:
            continue
        again = list_journals(journal_folders(layout))
        if [file.name for file, _ in files] == [file.name for file, _ in again]:
            break
    return journals
