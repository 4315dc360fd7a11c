"""Files of a partition, written anew as one sorted file that takes their place.

The files are read a row group at a time. `choose.pack` limits how many are read at once.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from localtrace.schema import TableSchema
from localtrace.store.layout import StoreLayout
from localtrace.store.tables.delta import CommittedFile
from localtrace.store.tables.drafts import Draft, drafting
from localtrace.store.tables.parquet_files import (
    COLD_LEVEL,
    DamagedFile,
    WrittenFile,
    open_parquet,
    reading,
    write_rows,
)
from localtrace.store.tables.replacing import replace_files

Change: TypeAlias = Callable[[pa.Table], pa.Table]
_Key: TypeAlias = tuple[tuple[bool, Any], ...]


def rewrite(
    layout: StoreLayout,
    schema: TableSchema,
    groups: Iterable[Sequence[CommittedFile]],
    change: Change | None = None,
    into: Mapping[str, Change] | None = None,
) -> list[WrittenFile] | None:
    """Write the rows of each group of files as one sorted file, and replace all by one commit.

    Other processes may commit, rewrite and read the table meanwhile. A process that is killed has
    changed all or nothing.

    Args:
        layout: the store.
        schema: the table.
        groups: files of its state, those of a group all of one partition and made by `pack`.
        change: returns what a part of the rows becomes; it must keep their order and columns.
        into: instead, the change for each folder below the table that gets some of the rows, where
            they leave their partition.

    Returns:
        The new files, none where no row is left; None if another process rewrote one of the old
        ones meanwhile, and nothing was changed. The old ones stay on the disk until `vacuum`.

    Raises:
        DamagedFile: a file cannot be read, or does not hold the rows that the log tells.
        StoreError: the commit is refused.
        OSError: a new file cannot be written.
    """
    old: list[CommittedFile] = []
    with drafting(layout, schema) as drafts:
        for group in groups:
            old += group
            for folder, part in (into or {group[0].folder: change or _unchanged}).items():
                _write(drafts.add(folder), layout, schema, group, part)
        new = drafts.publish()
        if replace_files(layout, schema, old, new):
            return new
        drafts.withdraw()
        return None


def _unchanged(rows: pa.Table) -> pa.Table:
    return rows


def _write(
    draft: Draft,
    layout: StoreLayout,
    schema: TableSchema,
    group: Sequence[CommittedFile],
    change: Change,
) -> None:
    """Write what the rows of files become."""
    rows = 0

    def parts(sources: Sequence[_SortedFile]) -> Iterator[pa.Table]:
        nonlocal rows
        for part in _merged(sources, schema):
            rows += len(part)
            yield change(part)

    with contextlib.ExitStack() as opened:
        sources = [_SortedFile(file.place(layout, schema), schema) for file in group]
        for source in sources:
            opened.callback(source.close)
        draft.rows = write_rows(draft.path, schema, parts(sources), COLD_LEVEL)
    known = sum(file.rows or 0 for file in group)
    if rows != known:
        raise DamagedFile(
            f"table {schema.name}: files of {group[0].folder or 'it'} hold {rows} rows, and its "
            f"log tells {known}; run localtrace verify"
        )


class _SortedFile:
    """A table file, read one row group at a time."""

    def __init__(self, path: Path, schema: TableSchema) -> None:
        self._path, self._file = path, open_parquet(path, schema)
        self.close = self._file.close
        self._keys = [name for name, _ in schema.file_order]
        self._groups: int = self._file.num_row_groups
        self._next = 0
        self.rows = pa.Table.from_batches([], schema.file_arrow())

    @property
    def is_at_end(self) -> bool:
        """True where all row groups have been read."""
        return self._next == self._groups

    def fill(self) -> bool:
        """Read the next row group if no row is left of the last; return whether there are rows."""
        while not len(self.rows) and not self.is_at_end:
            with reading(self._path):
                self.rows = self._file.read_row_group(self._next)
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


def _merged(files: Sequence[_SortedFile], schema: TableSchema) -> Iterator[pa.Table]:
    """Yield the rows of sorted files in sorted parts, a row group of each in memory at a time.

    Where a file is not sorted, its rows come all the same.
    """
    live = [file for file in files if file.fill()]
    while live:
        # What follows in a file comes after its last key. So nothing that is not read yet comes
        # before the smallest of these.
        unfinished = [file for file in live if not file.is_at_end]
        first = min(unfinished, key=_SortedFile.last_key, default=None)
        bound = None if first is None else first.last_key()
        parts = [file.take(None if file is first else bound) for file in live]
        yield pa.concat_tables(parts).sort_by(schema.file_order)
        live = [file for file in live if file.fill()]
