"""One consistent look at a store: sealed files, and the rows of journals that are not sealed yet.

The order matters beside a running sealer: (1) open every journal and fix its length, (2) read each
table's newest state, (3) per table leave out the journals that this state already covers. Nothing
here writes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from localtrace.schema import TABLES
from localtrace.store.bundle import Bag
from localtrace.store.journal import (
    JournalFile,
    JournalName,
    JournalStatus,
    list_journals,
    read_frames,
    read_journal,
)
from localtrace.store.layout import StoreLayout
from localtrace.store.receipts import receipt_tables
from localtrace.store.rows import Damage, JournalRows
from localtrace.store.tables import committed_number, open_table, table_files
from localtrace.store.tokenizers import Decode, text_decoder

_LISTINGS_MAX = 50


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a store held at one moment."""

    files: dict[str, list[str]]
    """Absolute paths of sealed Parquet files by table."""
    pending: dict[str, pa.Table]
    """Rows of journals that are not sealed, by table."""
    pending_journals: int
    damage: Damage
    """What could not be read in the journals that are not sealed."""
    receipts: tuple[str, ...] = ()
    """Absolute paths of the Parquet files of receipts."""
    partitioned: bool = True
    """Partition columns stand in the paths of the files; False: in the files, as in bundles."""

    def rows(self, table: str, columns: list[str]) -> list[dict[str, Any]]:
        """All rows of a small table without partitions."""
        tables = [self.pending[table].select(columns)]
        for path in self.files[table]:
            with pq.ParquetFile(path) as file:
                tables.append(file.read(columns))  # those that its format version knew
        return [
            {name: row.get(name) for name in columns} for part in tables for row in part.to_pylist()
        ]


@dataclass(frozen=True, slots=True)
class OpenJournal:
    """The bytes of a journal up to the length it had when it was opened."""

    file: JournalFile
    data: bytes
    status: JournalStatus


def take_snapshot(layout: StoreLayout) -> Snapshot:
    """Look at a store once.

    Raises:
        StoreError: a journal folder or a table cannot be read.
    """
    if layout.bags:
        return _bundled(layout.bags)
    journals = open_journals(layout)
    files = {}
    tables = {}
    for name, schema in TABLES.items():
        tables[name] = open_table(layout, schema)
        files[name] = table_files(layout, tables[name], schema)
    rows = uncommitted_rows(journals, tables, text_decoder(layout))
    names = {name for table in rows.values() for name in table.journals}
    damage = max((table.damage for table in rows.values()), key=lambda one: one.records)
    pending = {name: table.rows for name, table in rows.items()}
    return Snapshot(files, pending, len(names), damage, receipt_tables(layout))


def _bundled(bags: Sequence[Bag]) -> Snapshot:
    files = {}
    for table in TABLES:
        # Parts hold the same runs and metrics, in files of the same names, which tell the content.
        paths = {path.name: str(path) for bag in bags for path in bag.table_files(table)}
        files[table] = list(paths.values())
    pending = {name: schema.arrow().empty_table() for name, schema in TABLES.items()}
    return Snapshot(files, pending, 0, Damage(), partitioned=False)


@dataclass(frozen=True, slots=True)
class Uncommitted:
    """The rows of journals that a table's committed state lacks."""

    rows: pa.Table
    journals: frozenset[JournalName]
    unreadable: frozenset[JournalName]
    """Those of which a part cannot be read."""
    damage: Damage


def uncommitted_rows(
    journals: Sequence[OpenJournal],
    tables: Mapping[str, DeltaTable | None],
    decode: Decode,
    left_out: Container[bytes] = frozenset(),
) -> dict[str, Uncommitted]:
    """Rows by table, from the journals that the table does not cover yet.

    Tables usually lack the same journals; only a sealer that died between two commits makes them
    differ.

    Args:
        left_out: trace ids of trajectories whose spans are not wanted.
    """
    read: dict[frozenset[JournalName], tuple[JournalRows, frozenset[JournalName]]] = {}
    result = {}
    for name, table in tables.items():
        left = [
            journal
            for journal in journals
            if journal.file.name.number > committed_number(table, journal.file.name.writer_id)
        ]
        names = frozenset(journal.file.name for journal in left)
        if names not in read:
            read[names] = _rows(left, decode, left_out)
        rows, unreadable = read[names]
        result[name] = Uncommitted(rows.columns[name].table(), names, unreadable, rows.damage)
    return result


def _rows(
    journals: Sequence[OpenJournal], decode: Decode, left_out: Container[bytes]
) -> tuple[JournalRows, frozenset[JournalName]]:
    rows = JournalRows(decode, left_out)
    unreadable = frozenset(
        journal.file.name
        for journal in journals
        if not rows.add_journal(read_frames(journal.data), journal.status)
    )
    return rows, unreadable


def open_journals(layout: StoreLayout) -> list[OpenJournal]:
    """Read every journal; list again when one vanished or was renamed meanwhile."""
    journals: list[OpenJournal] = []
    for _ in range(_LISTINGS_MAX):
        found = list_journals(layout.journal_folders())
        try:
            journals = [OpenJournal(file, read_journal(file), status) for file, status in found]
        except FileNotFoundError:
            continue
        if [file.name for file, _ in found] == [
            file.name for file, _ in list_journals(layout.journal_folders())
        ]:
            break
    return journals
