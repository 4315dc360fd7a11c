"""The ledger: what each destination is known to hold, so that every upload is safe to repeat.

A row is written as `sent` before its record leaves, and changes when the answer arrives. After a
crash, `sent` therefore means that the fate is unknown; no row means that the record was never sent.
It is one SQLite file in the uploader's own folder, never in a store.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from localtrace.errors import UploadError
from localtrace.store.files import exclusive
from localtrace.types import Run
from localtrace.uploader.state import REMEDY
from localtrace.uploader.targets import Entry, Place

LEDGER_VERSION = 3
BUSY_TIMEOUT_S = 30.0
_TABLES = f"""
    create table if not exists entries (
        destination text not null,
        trace_id    text not null,
        remote_id   text not null,
        digest      text not null,
        state       text not null,
        reason      text,
        time_ns     integer not null,
        ids_from    text not null default '',
        primary key (destination, trace_id)
    ) strict, without rowid;
    create table if not exists places (
        uri       text not null,
        container text not null,
        run_id    text not null,
        attempt   integer not null,
        place     text not null,
        primary key (uri, container, run_id, attempt)
    ) strict, without rowid;
    create table if not exists speeds (
        uri          text not null primary key,
        trajectories integer not null,
        duration_s   real not null
    ) strict, without rowid;
    pragma user_version = {LEDGER_VERSION};
"""


class State(StrEnum):
    """The state of a record at its destination, as far as it is known."""

    SENT = "sent"
    """Sent or about to be sent; no answer is known."""
    ACCEPTED = "accepted"
    """Stored: the target confirmed it, or showed it when asked."""
    REJECTED = "rejected"
    """Refused by the target. The next upload tries again."""
    MISSING = "missing"
    """Accepted, but not found when it was read back. The next upload sends it again."""


@dataclass(frozen=True, slots=True)
class Known:
    """The ledger's knowledge of a trajectory at a destination."""

    state: State
    digest: str
    """Digest of the record that the state belongs to."""
    ids_from: str
    """Value of `Place.ids_from`."""

    @property
    def accepted(self) -> bool:
        """True if the target is known to hold the trajectory, in this or an earlier version."""
        return self.state is State.ACCEPTED

    def holds(self, entry: Entry) -> bool:
        """Return whether the target is known to hold the record with this digest."""
        return self.accepted and self.digest == entry.digest


class Ledger:
    """The uploader's durable record, one SQLite file for all targets."""

    def __init__(self, folder: Path) -> None:
        """Open `ledger.sqlite` in a folder; make it if it is missing.

        Raises:
            UploadError: the file is of another version, is damaged, or cannot be written.
        """
        self.path = folder / "ledger.sqlite"
        with self._explained():
            self._db = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S)
            (version,) = self._db.execute("pragma user_version").fetchone()
            if version == 0:
                self._db.executescript(_TABLES)
            elif version != LEDGER_VERSION:
                self._db.close()
                raise UploadError(
                    f"{self.path} is of version {version}, this localtrace writes version "
                    f"{LEDGER_VERSION}: use the localtrace that wrote it, or name another folder "
                    "in LOCALTRACE_STATE_DIR"
                )

    def known(self, destination: str, trace_ids: Sequence[str]) -> dict[str, Known]:
        """Return the ledger's knowledge of trajectories at a destination, by trace id."""
        rows = self._rows(
            "select trace_id, state, digest, ids_from from entries where destination = ? "
            "and trace_id in (select value from json_each(?))",
            (destination, msgspec.json.encode(trace_ids).decode()),
        )
        return {trace_id: Known(State(state), *others) for trace_id, state, *others in rows}

    def mark(self, entries: Iterable[Entry], state: State, reason: str | None = None) -> None:
        """Write one state for all entries in one durable transaction."""
        self._write(
            "entries",
            [
                (
                    e.place.destination, e.trace_id, e.remote_id, e.digest, state, reason,
                    time.time_ns(), e.place.ids_from,
                )
                for e in entries
            ],
        )  # fmt: skip

    def remember_place(self, uri: str, container: str | None, run: Run, place: Place) -> None:
        """Remember a run's place, so that a dry run need not ask the target."""
        text = msgspec.json.encode(place).decode()
        self._write("places", [(uri, container or "", run.run_id, run.attempt, text)])

    def place(self, uri: str, container: str | None, run: Run) -> Place | None:
        """Return the place where a run's trajectories went before, if they did."""
        rows = self._rows(
            "select place from places where (uri, container, run_id, attempt) = (?,?,?,?)",
            (uri, container or "", run.run_id, run.attempt),
        )
        return msgspec.json.decode(rows[0][0], type=Place) if rows else None

    def remember_speed(self, uri: str, trajectories: int, duration_s: float) -> None:
        """Remember how long an upload of so many trajectories took."""
        self._write("speeds", [(uri, trajectories, duration_s)])

    def speed(self, uri: str) -> float | None:
        """Return the trajectories per second of the last upload to a target, if one sent any."""
        rows = self._rows(
            "select trajectories / duration_s from speeds where uri = ? and duration_s > 0", (uri,)
        )
        return float(rows[0][0]) if rows else None

    def claim(self, uri: str) -> AbstractContextManager[None]:
        """Refuse other uploads to the same target while this one runs.

        Raises:
            StoreBusy: (on entering) another upload to this target is running.
        """
        name = sha256(uri.encode()).hexdigest()[:16]
        busy = f"another upload to {uri} is running: wait until it ends, then repeat this one"
        return exclusive(self.path.with_name(f"{name}.lock"), 0.0, busy)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _rows(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._explained():
            return self._db.execute(sql, values).fetchall()

    def _write(self, table: str, rows: Sequence[Sequence[Any]]) -> None:
        if rows:
            places = ",".join("?" * len(rows[0]))
            with self._explained(), self._db:
                self._db.executemany(f"insert or replace into {table} values ({places})", rows)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise UploadError(
                f"{self.path}: {error}; if it is damaged, move it away, and the target is asked "
                f"what it holds; otherwise {REMEDY}"
            ) from error
