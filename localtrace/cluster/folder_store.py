"""A store to gather from, as a folder: mounted, copied, or on the disk of this node.

Nothing here writes but `note`. Journals are left to the store's own sealer: only the node that
records can tell whether a journal's writer still lives.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from localtrace.errors import StoreError
from localtrace.schema import TABLES
from localtrace.store.files import is_file, open_file
from localtrace.store.gathered import Gathered, note_gathered
from localtrace.store.journal.folders import journal_folders
from localtrace.store.journal.journal_files import list_journals
from localtrace.store.layout import open_layout, read_meta
from localtrace.store.receipts import receipt_files
from localtrace.store.tables.delta import committed_files, committed_number, open_table
from localtrace.store.tables.gathered_rows import RowRanges, row_ranges
from localtrace.store.tables.log import torn_log_entry
from localtrace.store.tokenizers import tokenizer_files

PIECE_BYTES = 8 * 2**20
"""Most bytes of a file that are in memory at once."""
_LOOKS_MAX = 5


class SurveyedFile(msgspec.Struct, frozen=True):
    """A table file of the store, and whose rows it holds."""

    path: str
    """Relative to the table."""
    size_bytes: int
    ranges: RowRanges


class Survey(msgspec.Struct, frozen=True):
    """One state of a table."""

    paths: list[str]
    """All files of the state, relative to the table."""
    files: list[SurveyedFile]
    """Those of them that were not known."""
    journals: dict[str, int]
    """By writer of these files, the number of the last journal that the table holds; -1: none."""


class Source(Protocol):
    """A store to gather from, wherever it is."""

    place: str
    """Its address, for messages."""
    store_id: str

    def survey(self, table: str, known: Collection[str]) -> Survey:
        """Look at a table's newest state, and into its files that are not known."""

    def read(self, name: str, size_bytes: int) -> Iterator[bytes]:
        """Yield the bytes of a file, named relative to the store, in pieces.

        Raises:
            FileNotFoundError: it is gone.
            StoreError: it is something else than a file of this size.
        """

    def others(self) -> dict[str, int]:
        """Return the sizes of tokenizers and receipts, by names relative to the store."""

    def waiting(self) -> int:
        """Return the number of journals that are not sealed."""

    def note(self, into: str, note: Gathered) -> None:
        """Write down that the store of the id `into` has gathered rows.

        Raises:
            OSError: the store cannot be written.
        """


class FolderStore:
    """A store in a folder that this process can read.

    Raises:
        StoreNotFound: no store is there.
        StoreError: it is a bundle, or cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.layout = open_layout(path)
        if self.layout.bags:
            raise StoreError(f"{path} is a bundle: read it as a store of its own, with --store")
        self.place = str(self.layout.root)
        self.store_id = read_meta(self.layout).store_id
        self._root = os.path.realpath(self.layout.root)

    def survey(self, table: str, known: Collection[str]) -> Survey:
        """Look at a table's newest state, and into its files that are not known."""
        for _ in range(_LOOKS_MAX):
            try:
                return self._survey(table, known)
            except FileNotFoundError as error:  # a compaction removed files meanwhile
                gone = error
        raise StoreError(
            f"{gone.filename} is not there, though its table names it: copy the store again"
        ) from gone

    def _survey(self, name: str, known: Collection[str]) -> Survey:
        schema = TABLES[name]
        if torn := torn_log_entry(self.layout, schema):
            raise StoreError(f"{torn} is torn: run localtrace recover there, or copy it again")
        table = open_table(self.layout, schema)
        committed = committed_files(table)
        files = [
            SurveyedFile(file.path, file.size_bytes, row_ranges(self._inside(place)))
            for file in committed
            if file.path not in known
            for place in [f"tables/{name}/{file.path}"]
        ]
        writer_ids = {writer_id for file in files for writer_id in file.ranges}
        try:
            journals = {writer_id: committed_number(table, writer_id) for writer_id in writer_ids}
        except StoreError as error:  # its log was trimmed since it was opened
            raise FileNotFoundError(2, str(error), self.layout.table(name)) from error
        return Survey([file.path for file in committed], files, journals)

    def read(self, name: str, size_bytes: int) -> Iterator[bytes]:
        """Yield the bytes of a file, named relative to the store, in pieces."""
        for start in range(0, size_bytes, PIECE_BYTES):
            yield self.piece(name, size_bytes, start)

    def piece(self, name: str, size_bytes: int, start: int) -> bytes:
        """Return the bytes of a file from a place on, at most PIECE_BYTES."""
        with open(open_file(self._inside(name)), "rb", buffering=0) as file:
            length = min(PIECE_BYTES, size_bytes - start)
            piece = os.pread(file.fileno(), length, start)
            if os.fstat(file.fileno()).st_size != size_bytes or len(piece) != length:
                raise StoreError(f"{self.place}/{name} is not whole: copy it again")
            return piece

    def _inside(self, name: str) -> Path:
        """Refuse a folder that is a link, as one could lead out of the store."""
        place = os.path.join(self._root, name)
        if os.path.realpath(os.path.dirname(place)) != os.path.dirname(place):
            raise StoreError(f"{place} lies behind a link: put the folder itself in its place")
        return Path(place)

    def others(self) -> dict[str, int]:
        """Return the sizes of tokenizers and receipts, by names relative to the store."""
        found = (*tokenizer_files(self.layout), *receipt_files(self.layout))
        return {
            str(path.relative_to(self.layout.root)): path.stat().st_size
            for path in found
            if is_file(path)
        }

    def waiting(self) -> int:
        """Return the number of journals that are not sealed."""
        return len(list_journals(journal_folders(self.layout)))

    def note(self, into: str, note: Gathered) -> None:
        """Write down that the store of the id `into` has gathered rows."""
        note_gathered(self.layout, into, note)
