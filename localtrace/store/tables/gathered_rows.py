"""Rows gathered from other stores: which of them a table holds already, and their commit.

A writer numbers its records, journals hold them in order, and sealing takes the journals in order.
So a table holds the rows of each writer up to a number, however files are cut, merged or pruned,
and a row with a higher number is new. A commit of gathered rows carries three application
transactions per writer: `<writer_id>`, the number of its last journal, as in every commit;
`<writer_id>.rows`, the `writer_seq` of its last row; and `<writer_id>.gathered`, the first number
again, which tells that the second one still holds: nothing else was sealed since.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from localtrace.schema import TableSchema
from localtrace.store.layout import StoreLayout
from localtrace.store.tables.delta import (
    Overtaken,
    State,
    commit,
    committed_number,
    made_table,
    read_table,
)
from localtrace.store.tables.parquet_files import WrittenFile, open_parquet, reading

_WRITER_COLUMNS = ["writer_id", "writer_seq"]
_WRITER_ID = re.compile("[0-9a-f]{16}")
RowRanges: TypeAlias = dict[str, tuple[int, int]]
"""The lowest and the highest `writer_seq` of each writer's rows, by writer id."""


@dataclass(frozen=True, slots=True)
class Held:
    """The rows of one writer that a table holds: those up to some number."""

    journal: int
    """Number of the last journal that is in the table; -1 for none."""
    row: int
    """`writer_seq` up to which every row is, or once was, in the table; -1 for none."""
    is_gathered: bool = True
    """False where the last journal was sealed here, as in a copy of the writer's store."""


def row_ranges(path: Path) -> RowRanges:
    """Read which writers' rows a Parquet file holds, from two narrow columns.

    Raises:
        DamagedFile: it cannot be read, or a row tells no writer.
    """
    ranges: RowRanges = {}
    with reading(path), open_parquet(path) as file:
        for batch in file.iter_batches(columns=_WRITER_COLUMNS):
            add_ranges(ranges, pa.Table.from_batches([batch]))
    return ranges


def add_ranges(ranges: RowRanges, rows: pa.Table) -> None:
    """Add the writers of more rows to those of a file.

    Raises:
        pa.ArrowInvalid: a row tells no writer.
    """
    columns = [rows[name] for name in _WRITER_COLUMNS]
    if any(column.null_count for column in columns):
        raise pa.ArrowInvalid("a row does not tell the process that recorded it")
    # For the few rows of a small file, Arrow's grouping takes ten times as long.
    for writer_id, number in zip(*(column.to_pylist() for column in columns), strict=True):
        low, high = ranges.setdefault(writer_id, (number, number))
        if not low <= number <= high:
            ranges[writer_id] = min(low, number), max(high, number)
    if not all(map(_WRITER_ID.fullmatch, ranges)):
        raise pa.ArrowInvalid("a row does not tell the process that recorded it")


def held_rows(table: State | None, writer_id: str) -> Held:
    """Return how far a table holds the rows of a writer."""
    journal, row, gathered = (
        committed_number(table, f"{writer_id}{what}") for what in ("", ".rows", ".gathered")
    )
    return Held(journal, row, is_gathered=gathered == journal)


def rows_after(rows: pa.Table, last: Mapping[str, int]) -> pa.Table:
    """Return the rows whose `writer_seq` is greater than the last one of their writer."""
    limits = [last[writer_id] for writer_id in rows["writer_id"].to_pylist()]
    return rows.filter(pc.greater(rows["writer_seq"], pa.array(limits, pa.int64())))


def commit_gathered(
    layout: StoreLayout,
    schema: TableSchema,
    files: Sequence[WrittenFile],
    seen: State | None,
    after: Mapping[str, Held],
) -> None:
    """Commit files with rows of other stores, and sync the new log entry.

    Args:
        files: already in their place and on the disk.
        seen: the state of the table for which the new rows were chosen.
        after: how far it holds those of which there are new ones, with the files.

    Raises:
        Overtaken: it holds other rows of these writers meanwhile.
        StoreError: the table cannot be written.
    """
    table = made_table(layout, schema)
    # Read after the table was opened: of what comes still later, delta-rs makes a conflict.
    now = read_table(layout, schema)
    if any(held_rows(now, writer_id) != held_rows(seen, writer_id) for writer_id in after):
        raise Overtaken("rows of the same processes came meanwhile: gather again later")
    numbers = {
        application: number
        for writer_id, held in after.items()
        for application, number in (
            (writer_id, held.journal),
            (f"{writer_id}.rows", held.row),
            (f"{writer_id}.gathered", held.journal),
        )
    }
    commit(layout, schema, files, numbers, table)
