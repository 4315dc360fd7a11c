"""Sorted files read as one sorted stream, a row group of each in memory at a time."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from localtrace.schema import TableSchema
from localtrace.store.files import open_file
from localtrace.store.tables.parquet_files import conformed

_ARROW_FACTOR = 8
"""The size of rows in memory, at most, as usual: a multiple of the encoded one."""
_GROUP_BYTES = 32 * 2**20
"""The size in memory at which writers of table files end a row group."""

_Key = tuple[tuple[bool, Any], ...]


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file of a table.

    Raises:
        OSError: it is gone.
        StoreFormatError: something else than a file is there.
        ArrowInvalid: it is no Parquet file.
    """
    os.close(open_file(path))  # raises for a pipe, for which opening would wait
    return pq.ParquetFile(path)


class SortedFile:
    """A table file of any format version, read one row group at a time."""

    def __init__(self, path: Path, schema: TableSchema) -> None:
        self._file = open_parquet(path)
        self._groups: int = self._file.num_row_groups
        self._schema = schema
        # Partition columns are the same in all rows, and not in the file.
        self._keys = [name for name in schema.sort_by if name not in schema.partitions]
        self._next = 0
        self.rows = pa.Table.from_batches([], schema.file_arrow())

    def __enter__(self) -> SortedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def memory_bytes(self) -> int:
        """The memory that one row group takes, about."""
        found = self._file.metadata
        sizes = (found.row_group(n).total_byte_size for n in range(self._groups))
        return min(_GROUP_BYTES, _ARROW_FACTOR * max(sizes, default=0))

    @property
    def is_at_end(self) -> bool:
        """True where all row groups have been read."""
        return self._next == self._groups

    def fill(self) -> bool:
        """Read the next row group if no row is left of the last; return whether there are rows."""
        while not len(self.rows) and not self.is_at_end:
            held = self._file.schema_arrow.names
            names = [name for name in self._schema.file_arrow().names if name in held]
            self.rows = conformed(self._file.read_row_group(self._next, names), self._schema)
            self._next += 1
        return len(self.rows) > 0

    def last_key(self) -> _Key:
        """Return the sort key of the last row that was read."""
        return self._key(len(self.rows) - 1)

    def take(self, bound: _Key | None) -> pa.Table:
        """Take the rows up to a key, or all that were read."""
        end = len(self.rows)
        if bound is not None and self.last_key() > bound:
            end = bisect_right(range(end), bound, key=self._key)
        taken, self.rows = self.rows.slice(0, end), self.rows.slice(end)
        return taken

    def _key(self, place: int) -> _Key:
        # Arrow sorts nulls last, and texts by their bytes, as Python's code points are ordered.
        values = (self.rows.column(name)[place].as_py() for name in self._keys)
        return tuple((value is None, value) for value in values)


def merged(files: Sequence[SortedFile], schema: TableSchema) -> Iterator[pa.Table]:
    """Yield the rows of sorted files in sorted parts.

    Where a file is not sorted, its rows come all the same.
    """
    order = [(name, "ascending") for name in schema.sort_by if name not in schema.partitions]
    live = [file for file in files if file.fill()]
    while live:
        # What follows in a file comes after its last key. So nothing that is not read yet comes
        # before the smallest of these.
        going_on = [file for file in live if not file.is_at_end]
        first = min(going_on, key=SortedFile.last_key, default=None)
        bound = None if first is None else first.last_key()
        parts = [file.take(None if file is first else bound) for file in live]
        yield pa.concat_tables(parts).sort_by(order)
        live = [file for file in live if file.fill()]
