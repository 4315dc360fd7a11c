"""The ledger's SQLite file. Its errors say what to do."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from localtrace.errors import UploadError

BUSY_TIMEOUT_S = 30.0
_DAMAGED = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT})
_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
_PRIMARY = 0xFF
"""Mask for the primary code in SQLite's extended error codes."""


class LedgerFile:
    """A connection that raises `UploadError`. Each statement outside a transaction is durable."""

    def __init__(self, path: Path) -> None:
        """Open the file; make it if it is missing."""
        self.path = path
        with self._explained():
            self._db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_S)

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows."""
        with self._explained():
            return self._db.execute(sql, values).fetchall()

    def each(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run one statement for each row of values."""
        with self._explained():
            self._db.executemany(sql, rows)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the statements inside as one transaction."""
        self.rows("begin immediate")
        with self._explained(), self._db:
            yield

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise UploadError(f"{self.path}: {error}; {self._remedy(error)}") from error

    def _remedy(self, error: sqlite3.Error) -> str:
        code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY
        if code in _DAMAGED:
            return (
                "the ledger is damaged: move the file away and repeat the upload, which then asks "
                "the target what it holds"
            )
        if code in _FULL:
            return (
                f"free space in {self.path.parent}, or move that folder and name its new place in "
                "LOCALTRACE_STATE_DIR; then repeat the upload, which goes on where it ended"
            )
        if code == sqlite3.SQLITE_BUSY:
            return "other uploads keep it busy: wait until they end, then repeat this one"
        return (
            f"make {self.path.parent} writable, or set LOCALTRACE_STATE_DIR to a folder that is; "
            "then repeat the upload"
        )
