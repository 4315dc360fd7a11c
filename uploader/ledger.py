"""What each destination is known to hold: the memory that makes every upload safe to repeat.

A row is written as `sent` before a record leaves and changes when the answer is known, so after a
crash `sent` means unknown, and no row means never sent. The file lies in the uploader's own folder,
never in a store.
"""

from __future__ import annotations

import fcntl
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from hashlib import sha256
from pathlib import Path

from localtrace.errors import UploadError
from localtrace.uploader.targets import Entry

LEDGER_VERSION = 1
_TABLE = """
create table if not exists entries (
    destination text not null,
    trace_id    text not null,
    remote_id   text not null,
    digest      text not null,
    state       text not null,
    reason      text,
    time_ns     integer not null,
    primary key (destination, trace_id)
) strict, without rowid
"""


class State(StrEnum):
    """What is known of a record at its destination."""

    SENT = "sent"
    """Left for the target; the answer is not known."""
    ACCEPTED = "accepted"
    """The target said that it is stored, or showed it when asked."""
    REJECTED = "rejected"
    """The target, or the check before it, refused the record; a repeated upload tries again."""
    MISSING = "missing"
    """It was accepted, but reading back did not find it; a repeated upload sends it again."""


class Ledger:
    """The uploader's durable record, one SQLite file for all targets."""

    def __init__(self, folder: Path) -> None:
        """Open `ledger.sqlite` in a folder, or make it.

        Raises:
            UploadError: the file was written by a newer version.
        """
        path = folder / "ledger.sqlite"
        self._folder = folder
        self._db = sqlite3.connect(path, isolation_level=None)
        (version,) = self._db.execute("pragma user_version").fetchone()
        if version > LEDGER_VERSION:
            self._db.close()
            raise UploadError(f"{path} is of a newer version ({version}): upgrade localtrace")
        self._db.execute(_TABLE)
        self._db.execute(f"pragma user_version = {LEDGER_VERSION}")

    def accepted_digest(self, destination: str, trace_id: str) -> str | None:
        """The digest of the record that the destination is known to hold, if any."""
        row = self._db.execute(
            "select digest from entries where destination = ? and trace_id = ? and state = ?",
            (destination, trace_id, State.ACCEPTED),
        ).fetchone()
        return None if row is None else str(row[0])

    def mark(self, entries: Iterable[Entry], state: State, reason: str | None = None) -> None:
        """Write the state of entries, all or none, durably."""
        rows = [
            (e.place.destination, e.trace_id, e.remote_id, e.digest, state, reason, time.time_ns())
            for e in entries
        ]
        self._db.execute("begin immediate")
        with self._db:
            self._db.executemany("insert or replace into entries values (?,?,?,?,?,?,?)", rows)

    @contextmanager
    def claim(self, uri: str) -> Iterator[None]:
        """Keep a second upload to the same target out while this one runs.

        Raises:
            UploadError: another upload to this target is running.
        """
        name = sha256(uri.encode()).hexdigest()[:16]
        with (self._folder / f"{name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UploadError(
                    f"another upload to {uri} is running: wait until it ends, then repeat this one"
                ) from error
            yield

    def close(self) -> None:
        """Close the file."""
        self._db.close()
