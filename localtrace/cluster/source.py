"""A store to gather from: a folder that is mounted, copied, or on the disk of this node.

Nothing here writes. Journals are left to the store's own sealer: only the node that records can
tell whether a journal's writer still lives.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from localtrace.errors import StoreError
from localtrace.schema import TableSchema
from localtrace.store.files import is_file, open_file
from localtrace.store.layout import open_layout, read_meta
from localtrace.store.receipts import receipt_files
from localtrace.store.tables.delta import committed_files, committed_number, open_table
from localtrace.store.tables.gathered_rows import RowRanges, row_ranges
from localtrace.store.tables.log import torn_log_entry
from localtrace.store.tokenizers import tokenizer_files

_PIECE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class SurveyedFile:
    """A table file of the store, and whose rows it holds."""

    path: str
    """Relative to the table."""
    size_bytes: int
    ranges: RowRanges


@dataclass(frozen=True, slots=True)
class Survey:
    """One state of a table."""

    paths: list[str]
    """All files of the state, relative to the table."""
    files: list[SurveyedFile]
    """Those of them that were not known."""
    journals: dict[str, int]
    """By writer of these files, the number of the last journal that the table holds; -1: none."""


class Source:
    """A store in a folder.

    Raises:
        StoreNotFound: no store is there.
        StoreError: it is a bundle, or cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.layout = open_layout(path)
        if self.layout.bags:
            raise StoreError(f"{path} is a bundle: read it as a store of its own, with --store")
        self.store_id = read_meta(self.layout).store_id

    def survey(self, schema: TableSchema, known: Collection[str]) -> Survey:
        """Look at a table's newest state, and into its files that are not known.

        Raises:
            FileNotFoundError: a compaction removed files meanwhile.
            StoreError: the table cannot be read.
        """
        if torn := torn_log_entry(self.layout, schema):
            raise StoreError(f"{torn} is torn: run localtrace recover there, or copy it again")
        table = open_table(self.layout, schema)
        committed = committed_files(table)
        files = [
            SurveyedFile(file.path, file.size_bytes, row_ranges(place))
            for file in committed
            if file.path not in known
            for place in [self._inside(f"tables/{schema.name}/{file.path}")]
        ]
        writer_ids = {writer_id for file in files for writer_id in file.ranges}
        try:
            journals = {writer_id: committed_number(table, writer_id) for writer_id in writer_ids}
        except StoreError as error:  # its log was trimmed since it was opened
            raise FileNotFoundError(2, str(error), self.layout.table(schema.name)) from error
        return Survey([file.path for file in committed], files, journals)

    def read(self, name: str, size_bytes: int) -> Iterator[bytes]:
        """Yield the bytes of a file, named relative to the store, in pieces.

        Raises:
            FileNotFoundError: it is gone.
            StoreError: it is something else than a file of this size.
        """
        left = size_bytes
        with open(open_file(self._inside(name)), "rb", buffering=0) as file:
            while left and (piece := file.read(min(left, _PIECE_BYTES))):
                left -= len(piece)
                yield piece
            if left or os.fstat(file.fileno()).st_size != size_bytes:
                raise StoreError(f"{self.layout.root}/{name} is not whole: copy it again")

    def _inside(self, name: str) -> Path:
        """Refuse a folder that is a link, as one could lead out of the store."""
        place = self.layout.root.resolve() / name
        if place.parent.resolve() != place.parent:
            raise StoreError(f"{place} lies behind a link: put the folder itself in its place")
        return place

    def others(self) -> dict[str, int]:
        """Return the sizes of tokenizers and receipts, by names relative to the store."""
        return {
            str(path.relative_to(self.layout.root)): path.stat().st_size
            for path in (*tokenizer_files(self.layout), *receipt_files(self.layout))
            if is_file(path)
        }
