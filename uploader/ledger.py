"""The ledger: what each destination is known to hold, so that every upload is safe to repeat.

A row is written before its record leaves, and is marked as accepted when the target has confirmed
the record. A row without the mark therefore means that the fate is unknown; no row means that the
record was never sent. It is one SQLite file in the uploader's own folder, never in a store.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from localtrace.errors import ConfigError, UploadError
from localtrace.record.config import read_environment
from localtrace.record.settings import UploaderSettings
from localtrace.store.files import exclusive
from localtrace.types import Run
from localtrace.uploader.targets import Entry, Place

LEDGER_VERSION = 5
BUSY_TIMEOUT_S = 30.0
REMEDY = (
    "free space there, or set LOCALTRACE_STATE_DIR to a folder that can be written; then repeat"
)
"""What to do where the folder cannot be written."""
_TABLES = f"""
    create table if not exists entries (
        destination text not null,
        trace_id    text not null,
        accepted    integer not null,
        digest      text not null,
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
    pragma user_version = {LEDGER_VERSION};
"""


def state_folder() -> Path:
    """Make and return the uploader's folder, which holds its ledger and its receipts.

    It is LOCALTRACE_STATE_DIR, or `localtrace` in the user's state folder.

    Raises:
        ConfigError: the folder cannot be made.
    """
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    configured = read_environment(UploaderSettings).state_dir
    folder = configured or Path(f"{home}/localtrace").expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"cannot make the uploader's folder {folder}: {error.strerror}; "
            "set LOCALTRACE_STATE_DIR to a folder that can be written"
        ) from error
    return folder


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

    def known(self, destination: str, trace_ids: Sequence[str]) -> dict[str, str | None]:
        """Return the digest that the target is known to hold of each trajectory, by trace id.

        None where the fate of a record that was sent is unknown.
        """
        return dict(
            self._rows(
                "select trace_id, iif(accepted, digest, null) from entries where destination = ? "
                "and trace_id in (select value from json_each(?))",
                (destination, msgspec.json.encode(trace_ids).decode()),
            )
        )

    def mark(self, entries: Iterable[Entry], *, accepted: bool) -> None:
        """Note in one durable transaction whether the target has accepted all entries."""
        rows = [(e.place.destination, e.trace_id, accepted, e.digest) for e in entries]
        self._write("entries", rows)

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
