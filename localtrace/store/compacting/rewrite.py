"""Files of a partition, written anew as one sorted file that takes their place.

A draft is written in a folder that readers of Delta Lake and Parquet pass over. It gets its name
just before the commit, so that a process that is killed leaves a draft and no stray table file.
"""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from localtrace.schema import TableSchema
from localtrace.store.files import make_folder, sync
from localtrace.store.layout import REWRITING, StoreLayout
from localtrace.store.tables.delta import CommittedFile, removed_if_refused
from localtrace.store.tables.parquet_files import (
    COLD_LEVEL,
    DamagedFile,
    WrittenFile,
    conformed,
    file_name,
    open_parquet,
    reading,
    sync_with_folders,
    write_rows,
    written_file,
)
from localtrace.store.tables.replacing import replace_files

Change: TypeAlias = Callable[[pa.Table], pa.Table]
_Key: TypeAlias = tuple[tuple[bool, Any], ...]
_DRAFT_MAX_AGE_S = 24 * 3600.0
_MEMORY_BYTES = 256 * 2**20
"""Memory for the row groups that are read at once. Sorting and writing them takes as much again."""
_GROUP_BYTES = 32 * 2**20
"""The size in memory at which writers of table files end a row group."""
_ARROW_FACTOR = 8
"""The size of rows in memory, at most, as usual: a multiple of the encoded one."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Rewritings of one commit."""

    old: Sequence[CommittedFile]
    """Files that left the table's state; they stay on the disk until `vacuum` deletes them."""
    new: Sequence[WrittenFile]
    """Files that took their place; none for a group of which no row is left."""


def rewrite(
    layout: StoreLayout,
    schema: TableSchema,
    groups: Iterable[Sequence[CommittedFile]],
    change: Change | None = None,
    into: Mapping[str, Change] | None = None,
) -> Rewrite | None:
    """Write the rows of each group of files as one sorted file, and replace all by one commit.

    Other processes may commit, rewrite and read the table meanwhile. A process that is killed has
    changed all or nothing.

    Args:
        layout: the store.
        schema: the table.
        groups: files of its state, those of a group all of one partition. A group becomes several
            files where merging all at once would take too much memory.
        change: returns what a part of the rows becomes; it must keep their order and columns.
        into: instead, the change for each folder below the table that gets some of the rows, where
            they leave their partition.

    Returns:
        What was committed; None if another process rewrote one of the files meanwhile, and nothing
        was changed.

    Raises:
        DamagedFile: a file cannot be read, or does not hold the rows that the log tells.
        StoreError: the commit is refused.
        OSError: a new file cannot be written.
    """
    old: list[CommittedFile] = []
    with drafting() as drafts:
        for group in groups:
            old += group
            while group:
                for folder, part in (into or {group[0].folder: change or _unchanged}).items():
                    drafts.append(Draft(layout, schema, folder))
                    count = _write(layout, schema, drafts[-1], group, part)
                group = group[count:]
        new = [draft.publish() for draft in drafts if draft.rows]
        with removed_if_refused(layout, schema, new):
            if replace_files(layout, schema, old, new):
                return Rewrite(old, new)
        for draft in drafts:
            draft.place.unlink(missing_ok=True)
        return None


def _unchanged(rows: pa.Table) -> pa.Table:
    return rows


@contextlib.contextmanager
def drafting() -> Iterator[list[Draft]]:
    """Yield a list for drafts; those in it that were not published are deleted in the end."""
    drafts: list[Draft] = []
    try:
        yield drafts
    finally:
        for draft in drafts:
            draft.path.unlink(missing_ok=True)


class Draft:
    """A new file until its commit."""

    def __init__(self, layout: StoreLayout, schema: TableSchema, folder: str) -> None:
        self._layout, self._schema = layout, schema
        name = file_name()
        self.path = layout.table(schema.name) / REWRITING / name.removesuffix(".parquet")
        self.place = layout.table(schema.name) / folder / name
        self.rows = 0
        for path in (self.path, self.place):
            make_folder(layout.root, path.parent)

    def publish(self) -> WrittenFile:
        """Sync it and give it its name."""
        sync(self.path)
        os.replace(self.path, self.place)
        sync_with_folders(self._layout, self.place)
        return written_file(self._layout, self._schema, self.place, self.rows)


def _write(
    layout: StoreLayout,
    schema: TableSchema,
    draft: Draft,
    group: Sequence[CommittedFile],
    change: Change,
) -> int:
    """Write the rows of the first files, as many as memory allows; return how many files."""
    rows = size_bytes = 0
    sources: list[_SortedFile] = []

    def parts() -> Iterator[pa.Table]:
        nonlocal rows
        for part in _merged(sources, schema):
            rows += len(part)
            yield change(part)

    with contextlib.ExitStack() as opened:
        for file in group:
            source = _SortedFile(file.place(layout, schema), schema)
            opened.callback(source.close)
            size_bytes += source.memory_bytes
            if len(sources) >= 2 and size_bytes > _MEMORY_BYTES:
                break
            sources.append(source)
        draft.rows = write_rows(draft.path, schema, parts(), COLD_LEVEL)
    known = sum(file.rows or 0 for file in group[: len(sources)])
    if rows != known:
        raise DamagedFile(
            f"table {schema.name}: files of {group[0].folder or 'it'} hold {rows} rows, and its "
            f"log tells {known}; run localtrace verify"
        )
    return len(sources)


class _SortedFile:
    """A table file, read one row group at a time."""

    def __init__(self, path: Path, schema: TableSchema) -> None:
        self._path, self._file = path, open_parquet(path)
        self.close = self._file.close
        self._schema = schema
        # Partition columns are the same in all rows, and not in the file.
        self._keys = [name for name in schema.sort_by if name not in schema.partitions]
        self._groups: int = self._file.num_row_groups
        self._next = 0
        self.rows = pa.Table.from_batches([], schema.file_arrow())

    @property
    def memory_bytes(self) -> int:
        """The memory that one row group takes, about."""
        metadata = self._file.metadata
        sizes = (metadata.row_group(n).total_byte_size for n in range(self._groups))
        return min(_GROUP_BYTES, _ARROW_FACTOR * max(sizes, default=0))

    @property
    def is_at_end(self) -> bool:
        """True where all row groups have been read."""
        return self._next == self._groups

    def fill(self) -> bool:
        """Read the next row group if no row is left of the last; return whether there are rows."""
        while not len(self.rows) and not self.is_at_end:
            with reading(self._path):
                self.rows = conformed(self._file.read_row_group(self._next), self._schema)
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
    order = [(name, "ascending") for name in schema.sort_by if name not in schema.partitions]
    live = [file for file in files if file.fill()]
    while live:
        # What follows in a file comes after its last key. So nothing that is not read yet comes
        # before the smallest of these.
        unfinished = [file for file in live if not file.is_at_end]
        first = min(unfinished, key=_SortedFile.last_key, default=None)
        bound = None if first is None else first.last_key()
        parts = [file.take(None if file is first else bound) for file in live]
        yield pa.concat_tables(parts).sort_by(order)
        live = [file for file in live if file.fill()]


def remove_drafts(layout: StoreLayout, schema: TableSchema) -> None:
    """Delete drafts that killed processes left a day ago or earlier."""
    for draft in (layout.table(schema.name) / REWRITING).glob("v*"):
        with contextlib.suppress(OSError):
            if time.time() - draft.lstat().st_mtime > _DRAFT_MAX_AGE_S:
                draft.unlink()
