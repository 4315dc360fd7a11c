"""Files of a partition, written anew as one that takes their place.

A draft is written in a folder that readers of Delta Lake and Parquet pass over. It gets its name
just before the commit, so that a process that is killed leaves a draft and no stray table file.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa

from localtrace.errors import StoreError
from localtrace.schema import TableSchema
from localtrace.store.compacting.merge import SortedFile, merged
from localtrace.store.files import make_folder, sync
from localtrace.store.layout import REWRITING, StoreLayout
from localtrace.store.tables.delta import CommittedFile
from localtrace.store.tables.parquet_files import (
    COLD_LEVEL,
    WrittenFile,
    file_name,
    sync_with_folders,
    write_rows,
    written_file,
)
from localtrace.store.tables.refused_files import removed_if_refused
from localtrace.store.tables.replacing import replace_files

Change: TypeAlias = Callable[[pa.Table], pa.Table]
_DRAFT_NAME = re.compile(r"v\d+-[0-9a-f]{32}")
_DRAFT_MAX_AGE_S = 24 * 3600.0
_MEMORY_BYTES = 256 * 2**20
"""Memory for the row groups that are read at once. Sorting and writing them takes as much again."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Rewritings of one commit."""

    old: Sequence[CommittedFile]
    """Files that left the table's state; they stay on the disk until `vacuum` deletes them."""
    new: Sequence[WrittenFile]
    """Files that took their place: one for each group, none for a group of which no row is left."""


def rewrite(
    layout: StoreLayout,
    schema: TableSchema,
    groups: Iterable[Sequence[CommittedFile]],
    change: Change | None = None,
    into: Mapping[str, Change] | None = None,
) -> Rewrite | None:
    """Write the rows of each group of files as one sorted file, and replace all by one commit.

    Other processes may commit, rewrite and read the table meanwhile. A process that is killed has
    changed all or nothing. A group of which `change` leaves no row gets no new file.

    Args:
        layout: the store.
        schema: the table.
        groups: files of its state, those of a group all of one partition. The last ones of a group
            stay as they are where all together would take too much memory.
        change: returns what a part of the rows becomes; it must keep their order and columns.
        into: instead, the change for each folder below the table that gets some of the rows, where
            they leave their partition.

    Returns:
        What was committed; None if another process rewrote one of the files meanwhile, and nothing
        was changed.

    Raises:
        StoreError: a file does not hold the rows that the log tells, or the commit is refused.
        OSError: a file is gone, or a new one cannot be written.
        ArrowInvalid: a file is damaged.
    """
    old: list[CommittedFile] = []
    drafts: list[_Draft] = []
    try:
        for group in groups:
            for folder, one in into.items() if into else ((group[0].folder, change),):
                drafts.append(_Draft(layout.table(schema.name), folder))
                read = _write(layout, schema, drafts[-1], group, one)
            old += read
        new = [draft.publish(layout, schema) for draft in drafts if draft.rows]
        with removed_if_refused(layout, schema, new):
            if replace_files(layout, schema, old, new):
                return Rewrite(old, new)
        for draft in drafts:
            draft.place.unlink(missing_ok=True)
        return None
    finally:
        for draft in drafts:
            draft.path.unlink(missing_ok=True)


class _Draft:
    """A new file until its commit."""

    def __init__(self, table: Path, folder: str) -> None:
        name = file_name()
        self.path = table / REWRITING / name.removesuffix(".parquet")
        self.place = table / folder / name
        self.rows = 0
        make_folder(table, self.path.parent)
        make_folder(table, self.place.parent)

    def publish(self, layout: StoreLayout, schema: TableSchema) -> WrittenFile:
        """Sync it and give it its name."""
        sync(self.path)
        os.replace(self.path, self.place)
        sync_with_folders(layout, self.place)
        return written_file(layout, schema, self.place, self.rows)


def _write(
    layout: StoreLayout,
    schema: TableSchema,
    draft: _Draft,
    group: Sequence[CommittedFile],
    change: Change | None,
) -> list[CommittedFile]:
    """Write a draft; return the files whose rows it holds, after having counted the rows."""
    read = kept = 0

    def parts() -> Iterator[pa.Table]:
        nonlocal read, kept
        for part in merged(sources, schema):
            read += len(part)
            left = part if change is None else change(part)
            kept += len(left)
            yield left

    with contextlib.ExitStack() as opened:
        sources = _opened(opened, layout, schema, group)
        draft.rows = write_rows(draft.path, schema, parts(), COLD_LEVEL)
    files = list(group[: len(sources)])
    known = [file.rows for file in files if file.rows is not None]
    if draft.rows != kept or (len(known) == len(files) and read != sum(known)):
        raise StoreError(
            f"table {schema.name}: of {sum(known)} rows that its log tells, {read} were read and "
            f"{draft.rows} of {kept} written: nothing was changed; run localtrace verify"
        )
    return files


def _opened(
    opened: contextlib.ExitStack,
    layout: StoreLayout,
    schema: TableSchema,
    files: Sequence[CommittedFile],
) -> list[SortedFile]:
    """Open the first files, as many as fit into the memory, and two at least."""
    sources: list[SortedFile] = []
    size_bytes = 0
    for file in files:
        source = opened.enter_context(SortedFile(file.place(layout, schema), schema))
        size_bytes += source.memory_bytes
        if len(sources) >= 2 and size_bytes > _MEMORY_BYTES:
            break
        sources.append(source)
    return sources


def remove_drafts(layout: StoreLayout, schema: TableSchema) -> int:
    """Delete drafts that killed processes left a day ago or earlier; return their number."""
    count = 0
    folder = layout.table(schema.name) / REWRITING
    with contextlib.suppress(FileNotFoundError):
        for path in list(folder.iterdir()):
            with contextlib.suppress(OSError):
                is_old = time.time() - path.lstat().st_mtime > _DRAFT_MAX_AGE_S
                if is_old and _DRAFT_NAME.fullmatch(path.name):
                    path.unlink()
                    count += 1
    return count
