"""The ledger: what each destination is known to hold, so that every upload is safe to repeat.

A row is written as `sent` before its record leaves, and changes when the answer arrives. After a
crash, `sent` therefore means that the fate is unknown; no row means that the record was never sent.
The file lies in the uploader's own folder, never in a store.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path

import msgspec

from localtrace.errors import UploadError
from localtrace.store.files import locked
from localtrace.types import Run
from localtrace.uploader.ledger_file import LedgerFile
from localtrace.uploader.state import writing
from localtrace.uploader.targets import Entry, Place

LEDGER_VERSION = 3
_TABLES = (
    """
    create table entries (
        destination text not null,
        trace_id    text not null,
        remote_id   text not null,
        digest      text not null,
        state       text not null,
        reason      text,
        time_ns     integer not null,
        ids_from    text not null default '',
        primary key (destination, trace_id)
    ) strict, without rowid
    """,
    """
    create table places (
        uri       text not null,
        container text not null,
        run_id    text not null,
        attempt   integer not null,
        place     text not null,
        primary key (uri, container, run_id, attempt)
    ) strict, without rowid
    """,
    """
    create table speeds (
        uri          text not null primary key,
        trajectories integer not null,
        duration_s   real not null
    ) strict, without rowid
    """,
)


class State(StrEnum):
    """The state of a record at its destination, as far as it is known."""

    SENT = "sent"
    """Sent or about to be sent; no answer is known."""
    ACCEPTED = "accepted"
    """Stored: the target confirmed it, or showed it when asked."""
    REJECTED = "rejected"
    """Refused by the target, or by the checks before sending. The next upload tries again."""
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


class Ledger:
    """The uploader's durable record, one SQLite file for all targets."""

    def __init__(self, folder: Path) -> None:
        """Open `ledger.sqlite` in a folder; make it if it is missing.

        Raises:
            UploadError: the file is of another version, is damaged, or cannot be written.
        """
        path = folder / "ledger.sqlite"
        self._folder = folder
        self._file = LedgerFile(path)
        if self._version() == 0:
            self._create()
        if (version := self._version()) != LEDGER_VERSION:
            self._file.close()
            raise UploadError(
                f"{path} is of version {version}, this localtrace writes version "
                f"{LEDGER_VERSION}: use the localtrace that wrote it, or name another folder in "
                "LOCALTRACE_STATE_DIR"
            )

    def _version(self) -> int:
        return int(self._file.rows("pragma user_version")[0][0])

    def _create(self) -> None:
        with self._file.transaction():
            if self._version() == 0:  # no other process was quicker
                for table in _TABLES:
                    self._file.rows(table)
                self._file.rows(f"pragma user_version = {LEDGER_VERSION}")

    def known(self, destination: str, trace_id: str) -> Known | None:
        """Return the ledger's knowledge of a trajectory at a destination, if it has any."""
        rows = self._file.rows(
            "select state, digest, ids_from from entries where destination = ? and trace_id = ?",
            (destination, trace_id),
        )
        return Known(State(rows[0][0]), *rows[0][1:]) if rows else None

    def holds(self, entry: Entry) -> bool:
        """Return whether the target is known to hold the record with this digest."""
        known = self.known(entry.place.destination, entry.trace_id)
        return known is not None and known.accepted and known.digest == entry.digest

    def places(self, place: Place, trace_ids: Iterable[str]) -> dict[str, Place]:
        """Return each trajectory's place, with the seed of the ids that it has there already."""
        known = {trace_id: self.known(place.destination, trace_id) for trace_id in trace_ids}
        return {
            trace_id: msgspec.structs.replace(place, ids_from=one.ids_from)
            if one and one.ids_from
            else place
            for trace_id, one in known.items()
        }

    def mark(self, entries: Iterable[Entry], state: State, reason: str | None = None) -> None:
        """Write one state for all entries in one durable transaction."""
        self.mark_each((entry, state, reason) for entry in entries)

    def mark_each(self, states: Iterable[tuple[Entry, State, str | None]]) -> None:
        """Write a state and a reason for each entry in one durable transaction."""
        rows = [
            (
                e.place.destination, e.trace_id, e.remote_id, e.digest, state, reason,
                time.time_ns(), e.place.ids_from,
            )
            for e, state, reason in states
        ]  # fmt: skip
        with self._file.transaction():
            self._file.each("insert or replace into entries values (?,?,?,?,?,?,?,?)", rows)

    def remember_place(self, uri: str, container: str | None, run: Run, place: Place) -> None:
        """Remember a run's place, so that a dry run need not ask the target."""
        key = (uri, container or "", run.run_id, run.attempt)
        text = msgspec.json.encode(place).decode()
        self._file.rows("insert or replace into places values (?,?,?,?,?)", (*key, text))

    def place(self, uri: str, container: str | None, run: Run) -> Place | None:
        """Return the place where a run's trajectories went before, if they did."""
        rows = self._file.rows(
            "select place from places where (uri, container, run_id, attempt) = (?,?,?,?)",
            (uri, container or "", run.run_id, run.attempt),
        )
        if not rows:
            return None
        return msgspec.json.decode(rows[0][0], type=Place)

    def remember_speed(self, uri: str, trajectories: int, duration_s: float) -> None:
        """Remember how long an upload of so many trajectories took."""
        row = (uri, trajectories, duration_s)
        self._file.rows("insert or replace into speeds values (?,?,?)", row)

    def speed(self, uri: str) -> float | None:
        """Return the trajectories per second of the last upload to a target, if one sent any."""
        rows = self._file.rows(
            "select trajectories / duration_s from speeds where uri = ? and duration_s > 0", (uri,)
        )
        return float(rows[0][0]) if rows else None

    @contextmanager
    def claim(self, uri: str) -> Iterator[None]:
        """Refuse other uploads to the same target while this one runs.

        Raises:
            UploadError: another upload to this target is running.
        """
        name = sha256(uri.encode()).hexdigest()[:16]
        with self._locked(name, wait_s=0) as is_ours:
            if not is_ours:
                raise UploadError(
                    f"another upload to {uri} is running: wait until it ends, then repeat this one"
                )
            yield

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Let one upload at a time find or make places: two addresses may lead to one target."""
        with self._locked("places", wait_s=math.inf):
            yield

    @contextmanager
    def _locked(self, name: str, wait_s: float) -> Iterator[bool]:
        with ExitStack() as opened:
            with writing(self._folder / f"{name}.lock") as path:
                is_ours = opened.enter_context(locked(path, wait_s))
            yield is_ours

    def close(self) -> None:
        """Close the file."""
        self._file.close()
