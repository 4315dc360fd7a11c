"""Processes that run SQL of others: each in a sandbox, killed at its limit, and replaced.

A text that no check can tell from others may take all memory, run for ever or crash its process. So
what a page, a link or the command line brings runs in a child, `child`, which no one else needs. It
is given the snapshots that its parent reads, so both see the same moment. What it answers is taken
for hostile: of bounded size, of known types, and checked before it is used.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING

import msgspec

from localtrace.errors import LocalTraceError, QueryCrashed, QueryError, StoreError
from localtrace.read.query_limits import (
    BATCH_ROWS,
    LOOK_INTERVAL_S,
    NOBODY_WAITS,
    Limits,
    OnProgress,
)
from localtrace.read.spill_folder import SpillFolder
from localtrace.store.layout import StoreLayout

if TYPE_CHECKING:
    import pyarrow as pa

    from localtrace.store.tables.snapshot import Copies

_START_S = 60.0
"""The time in which a child begins with a query."""
_GRACE_S = 2.0
"""The time in which a query stops by itself, when its own is over."""
_SMALL_BYTES = 2**20
_WRONG = "the process of the query gave"
# A process keeps what it gave up, and so do its threads: nothing else is imported before.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from localtrace.read.landlock import give_up_rights
give_up_rights(sys.argv[2])
from localtrace.read.child import main
main(sys.argv[2])
"""


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """Snapshots that a child runs queries on."""

    layouts: Sequence[StoreLayout]
    stores: Sequence[Copies]
    limits: Limits


class Note(msgspec.Struct):
    """A part of an answer that is no rows; the last one says that the query is done."""

    done: bool = False
    share: float | None = None
    """Part of the query that is done, 0 to 1."""
    failed: str | None = None
    is_damage: bool = False
    """Whether it failed as a store is damaged."""


class Child:
    """A process that runs one query at a time."""

    def __init__(self) -> None:
        """Start the process, and do not wait for it."""
        spill = SpillFolder()
        self._pipe, theirs = Pipe()
        # Without -P a `duckdb.py` in the working directory would be run; -S: the path is known.
        program = [sys.executable, "-P", "-S", "-c", _PROGRAM, json.dumps([*map(str, sys.path)])]
        self._process = subprocess.Popen(
            [*program, str(spill.path or "")], stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, process_group=0,
        )  # fmt: skip
        theirs.close()
        self.close: Callable[[], object] = weakref.finalize(
            self, _end, self._process, self._pipe, spill, os.getpid()
        )
        """Kill the process, and remove its files."""
        self._offered: Offer | None = None
        self._is_waiting = True

    def is_waiting(self) -> bool:
        """Tell whether the process lives and waits for a query."""
        return self._is_waiting and self._process.poll() is None

    def ask(
        self,
        offer: Offer,
        sql: str,
        params: object,
        on_progress: OnProgress | None,
        unwanted: threading.Event,
    ) -> pa.Table:
        """Return the rows of one SELECT; the arguments are those of `Children.ask`."""
        self._is_waiting = False
        new = None if offer is self._offered else offer
        late = threading.Event()
        timer = self._end_after(_START_S, late)
        try:
            self._pipe.send_bytes(pickle.dumps((new, sql, params), protocol=5))
            self._receive(unwanted, _SMALL_BYTES)  # it begins
            timer.cancel()
            timer = self._end_after(offer.limits.timeout_s + _GRACE_S, late)
            rows = self._rows(offer.limits, on_progress, unwanted)
        except (EOFError, OSError) as error:
            if isinstance(error, StoreError):
                raise
            if late.is_set():
                raise QueryError(offer.limits.too_long) from None
            raise QueryCrashed(_how_it_ended(self._process)) from None
        finally:
            timer.cancel()
            self._is_waiting &= not late.is_set()
            self._offered = offer
        return rows

    def _end_after(self, seconds: float, late: threading.Event) -> threading.Timer:
        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        return timer

    def _rows(
        self, limits: Limits, on_progress: OnProgress | None, unwanted: threading.Event
    ) -> pa.Table:
        import pyarrow as pa

        tables: list[pa.Table] = []
        left_bytes = 2 * limits.memory_max_bytes + _SMALL_BYTES  # the child counts more exactly
        while True:
            data = self._receive(unwanted, left_bytes)
            left_bytes -= len(data)
            if data[:1] != b"{":
                tables.append(_table(data))
                if tables[-1].schema != tables[0].schema:
                    raise QueryCrashed(f"{_WRONG} rows of several kinds")
                continue
            note = _note(data)
            if on_progress is not None and not note.done:
                on_progress(note.share)
            if note.done:
                self._is_waiting = True
            if note.failed is not None:
                raise _failure(note)
            if note.done and not tables:
                raise QueryCrashed(f"{_WRONG} no rows")
            if note.done:
                return pa.concat_tables(tables)

    def _receive(self, unwanted: threading.Event, most_bytes: int) -> bytes:
        while not self._pipe.poll(LOOK_INTERVAL_S):
            if unwanted.is_set():
                raise QueryError(NOBODY_WAITS)
        return self._pipe.recv_bytes(most_bytes)


def _table(data: bytes) -> pa.Table:
    import pyarrow as pa

    try:
        table = pa.ipc.open_stream(data).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise QueryCrashed(f"{_WRONG} no rows: {' '.join(str(error).split())}") from None
    if len(table) > 2 * BATCH_ROWS:
        raise QueryCrashed(f"{_WRONG} more rows at a time than it may")
    return table


def _note(data: bytes) -> Note:
    try:
        return msgspec.json.decode(data[:_SMALL_BYTES], type=Note)
    except ValueError:
        raise QueryCrashed(f"{_WRONG} an answer that cannot be read") from None


def _failure(note: Note) -> LocalTraceError:
    return (StoreError if note.is_damage else QueryError)(note.failed)


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    code = process.returncode
    if code is None:
        return f"{_WRONG} an answer that is too large"
    how = f"exit code {code}"
    with suppress(ValueError):
        how = signal.Signals(-code).name
    return (
        f"the query ended its process ({how}), as one does that takes more memory than there is or "
        "is nested too deeply: narrow it down, or write it in fewer levels"
    )


def _end(process: subprocess.Popen[bytes], pipe: Connection, spill: SpillFolder, pid: int) -> None:
    pipe.close()
    if os.getpid() == pid:  # a forked child has the same objects
        process.kill()
        process.wait()
    spill.close()


class Children:
    """The children of this process, which start when they are needed.

    Args:
        places: how many queries may run side by side; they share the memory of one.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self.run_all = False
        """Whether this process is not expected to run SQL of its own."""
        self._free = threading.Semaphore(places)
        self._lock = threading.Lock()
        self._waiting: list[Child] = []

    def start(self) -> None:
        """Start a child for the next query, unless one waits."""
        with self._lock:
            if not self._waiting:
                self._waiting.append(Child())

    def ask(
        self,
        offer: Offer,
        sql: str,
        params: object,
        on_progress: OnProgress | None,
        unwanted: threading.Event,
    ) -> pa.Table:
        """Run one SELECT in a child, and return its rows.

        Args:
            offer: the snapshots to read.
            sql: the text.
            params: its parameters.
            on_progress: told how far the query is.
            unwanted: set when nobody waits for the query any more, which stops it.

        Raises:
            QueryError: it is not one SELECT, cannot be run, or takes too much time or memory.
            QueryCrashed: it ended the child.
            StoreError: a file is missing or damaged.
        """
        while not self._free.acquire(timeout=LOOK_INTERVAL_S):
            if unwanted.is_set():
                raise QueryError(NOBODY_WAITS)
        child = None
        try:
            child = self._take()
            return child.ask(offer, sql, params, on_progress, unwanted)
        finally:
            if child is not None:
                self._keep(child)
            self._free.release()

    def _take(self) -> Child:
        child = None
        with self._lock:
            while self._waiting and child is None:
                child = self._waiting.pop()
                if not child.is_waiting():
                    child.close()
                    child = None
            child = child or Child()
        if self.places > 1:
            self.start()  # so that the next query need not wait for a start
        return child

    def _keep(self, child: Child) -> None:
        with self._lock:
            if child.is_waiting() and len(self._waiting) < 2:
                self._waiting.append(child)
                return
        child.close()


_children: Children | None = None


def use_children(places: int = 1) -> Children:
    """Let SQL of others run in children of this process from now on, and return them.

    Args:
        places: how many queries may run side by side.
    """
    global _children
    _children = Children(places)
    return _children


def children() -> Children | None:
    """Return the children of this process; None where it runs all SQL itself."""
    return _children
