"""One consistent look at a store: sealed files, and the rows of journals that are not sealed yet.

The order matters beside a running sealer: (1) open every journal and fix its length, (2) read each
table's newest state, outcomes first, (3) per table leave out the journals that this state already
covers. Nothing here writes.

Where a store is read in several copies and bundles at once, the SQL views leave out the doubles.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from threading import RLock
from typing import Any, TypeAlias

import pyarrow as pa

from localtrace.schema import OUTCOMES, SPANS, TABLES, TableSchema
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
from localtrace.store.tables.delta import State, committed_number, read_table, table_files
from localtrace.store.tokenizers import RunTokenizers

_LISTINGS_MAX = 50
_SELECTIONS_MAX = 8
"""Selections of trajectories whose calls are read alone, each by a pass over all journals. Whoever
asks for more, as an export does, reads all calls once."""
_NO_JOURNALS: Mapping[str, Sequence[Any]] = dict.fromkeys(TABLES, ())
_reading = RLock()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The content of a store at one moment."""

    files: dict[str, list[str]]
    """Absolute paths of sealed Parquet files by table."""
    pending: Unsealed = field(default_factory=lambda: Unsealed())
    """Rows of journals that are not sealed, by table."""
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
    pending = Unsealed(_journals_left(journals, tables), layout)
    return Snapshot(files, pending, receipt_tables(layout))


def _open_tables(layout: StoreLayout) -> dict[str, State | None]:
    # Folding gives trajectories their values before it moves the outcomes. Opened in the other
    # order, a value is seen at least once.
    return {
        table.name: read_table(layout, table)
        for table in sorted(TABLES.values(), key=lambda table: table is not OUTCOMES)
    }


def _bundled(bags: Sequence[Bag]) -> Snapshot:
    files = {}
    for table in TABLES:
        # Parts hold the same runs and metrics, in files of the same names, which tell the content.
        paths = {path.name: str(path) for bag in bags for path in bag.table_files(table)}
        files[table] = list(paths.values())
    return Snapshot(files, partitioned=False)


class Unsealed(Mapping[str, pa.Table]):
    """The rows of journals that the committed state of each table lacks, by table.

    They are read when they are first asked for. Calls, which are most of a journal, are read apart
    from the rest, as most queries do without. Threads may share an instance.

    Args:
        journals: the journals that each table lacks.
        layout: the store, whose tokenizers turn ids into text; None where there are no journals.
    """

    def __init__(
        self,
        journals: Mapping[str, Sequence[OpenJournal]] = _NO_JOURNALS,
        layout: StoreLayout | None = None,
    ) -> None:
        self._journals = journals
        self._layout = layout
        self._parts: dict[tuple[frozenset[JournalName], bool], Uncommitted] = {}
        self._chosen: dict[frozenset[str], pa.Table] = {}
        """The calls of some trajectories, by their ids."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Unsealed, (self._journals, self._layout)

    def __iter__(self) -> Iterator[str]:
        return iter(self._journals)

    def __len__(self) -> int:
        return len(self._journals)

    def __getitem__(self, table: str) -> pa.Table:
        return self._part(table, with_calls=table == SPANS.name).tables[table]

    def calls_of(self, trace_ids: Collection[str]) -> pa.Table:
        """Return the calls of some trajectories, perhaps with others."""
        journals, names = self._left(SPANS.name)
        chosen = frozenset(trace_ids)
        with _reading:
            if (names, True) not in self._parts and len(self._chosen) < _SELECTIONS_MAX:
                if chosen not in self._chosen:
                    self._chosen[chosen] = self._rows(journals, names, chosen).tables[SPANS.name]
                return self._chosen[chosen]
            return self[SPANS.name]

    def has_rows(self, table: TableSchema) -> bool:
        """Tell whether a table has rows, without reading calls."""
        part = self._part(table.name)
        return part.calls_passed > 0 or part.tables[table.name].num_rows > 0

    @property
    def damage(self) -> Damage:
        """Counts of what could not be read, for which all calls are read."""
        parts = [self._part(table, with_calls=True) for table in self]
        return max((part.damage for part in parts), key=lambda damage: damage.records)

    @property
    def journal_count(self) -> int:
        """Number of the journals."""
        return len({journal.file.name for left in self._journals.values() for journal in left})

    def _part(self, table: str, with_calls: bool = False) -> Uncommitted:
        journals, names = self._left(table)
        with _reading:
            known = self._parts.get((names, True)) or self._parts.get((names, with_calls))
            if known is None:
                known = self._rows(journals, names, None if with_calls else ())
                self._parts[names, with_calls] = known
            return known

    def _left(self, table: str) -> tuple[Sequence[OpenJournal], frozenset[JournalName]]:
        # Tables usually lack the same journals.
        journals = self._journals[table]
        return journals, frozenset(journal.file.name for journal in journals)

    def _rows(
        self,
        journals: Sequence[OpenJournal],
        names: frozenset[JournalName],
        calls_of: Collection[str] | None,
    ) -> Uncommitted:
        if self._layout is None or not journals:
            tables = {name: schema.no_rows() for name, schema in TABLES.items()}
            return Uncommitted(tables, names, names, Damage())
        # Slow to import, and a reader of a store where all is sealed does without.
        from localtrace.store.tables.rows import JournalRows

        rows = JournalRows(RunTokenizers(self._layout).decode)
        for journal in journals:
            rows.add_journal(journal.file.name, journal.frames(), journal.status, calls_of)
        tables = rows.tables()
        unreadable = frozenset(rows.unreadable)
        return Uncommitted(tables, names, unreadable, rows.damage, rows.calls_passed)


@dataclass(frozen=True, slots=True)
class Uncommitted:
    """The rows of journals that the committed state of a table lacks."""

    tables: dict[str, pa.Table]
    journals: frozenset[JournalName]
    unreadable: frozenset[JournalName]
    """Journals of which a part cannot be read."""
    damage: Damage
    calls_passed: int = 0
    """Calls that were not read."""


def uncommitted_rows(
    journals: Sequence[OpenJournal], tables: Mapping[str, State | None], layout: StoreLayout
) -> dict[str, Uncommitted]:
    """Make, for each table, the rows of the journals that it does not cover yet."""
    unsealed = Unsealed(_journals_left(journals, tables), layout)
    return {name: unsealed._part(name, with_calls=True) for name in unsealed}


def _journals_left(
    journals: Sequence[OpenJournal], tables: Mapping[str, State | None]
) -> dict[str, list[OpenJournal]]:
    # Tables usually lack the same journals. They differ only after a sealer died between two
    # commits.
    return {
        name: [
            journal
            for journal in journals
            if journal.file.name.number > committed_number(table, journal.file.name.writer_id)
        ]
        for name, table in tables.items()
    }


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
