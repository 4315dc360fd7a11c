"""Limits of one query: how long it may run, and how large its result may be.

The result is counted here because DuckDB's own memory limit does not count the rows that it hands
over. DuckDB notices an interrupt only between two pieces of work. One long call of a function, such
as `levenshtein` of two texts of a million characters, therefore ends only with its process. The
command line ends its process; a library must not. This module knows nothing of stores.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from localtrace.errors import QueryError
from localtrace.read.guardian import end_process, limited_memory

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

OnProgress = Callable[[float | None], None]
"""A function that is told now and then the share of a query that is done, 0 to 1; None: unknown."""

NO_MEMORY = (
    "the query needs more memory than there is for it: narrow it down, to a step or a "
    "run for example, or select fewer columns"
)
NOBODY_WAITS = "the query was cancelled: client disconnected"
BATCH_ROWS = 20_000
"""The rows of a result that are handed over at a time."""
_LOOK_INTERVAL_S = 0.2
_STOP_S = 2.0
"""The time that a query has to stop after it was interrupted."""


def half_of_memory() -> int:
    """Return half of this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one query."""

    timeout_s: float = 300.0
    memory_max_bytes: int = field(default_factory=half_of_memory)
    """The memory that a query may use; its result may be as large."""

    @contextmanager
    def watch(
        self,
        connection: duckdb.DuckDBPyConnection,
        on_progress: OnProgress | None,
        clean: Callable[[], object],
        unwanted: threading.Event,
    ) -> Iterator[None]:
        """Stop what the connection runs inside the with block when its time or memory is used up.

        Args:
            connection: runs the query, in another thread.
            on_progress: told how far it is.
            clean: called before a process of the command line is ended because its query goes on.
            unwanted: set when nobody waits for the query any more, which stops it too.

        Raises:
            QueryError: the query was stopped, or there was no memory left.
        """
        watcher = _Watcher(connection, self.timeout_s, on_progress, clean, unwanted)
        watcher.start()
        try:
            with limited_memory(self.memory_max_bytes):
                yield
        except MemoryError:
            raise QueryError(NO_MEMORY) from None
        except Exception:
            if watcher.interrupted.is_set():
                raise QueryError(watcher.message) from None
            raise
        finally:
            watcher.done.set()
            watcher.join()  # so that no late interrupt hits the next query

    def check_size(self, size_bytes: int) -> None:
        """Refuse a result of this size if it is too large.

        Raises:
            QueryError: the result is too large.
        """
        if size_bytes > self.memory_max_bytes:
            raise QueryError(
                f"the result is larger than {self.memory_max_bytes / 1e9:.3g} GB: select fewer "
                "rows or columns, or add a LIMIT"
            )

    def collect(self, batches: pa.RecordBatchReader) -> pa.Table:
        """Return all rows of a result.

        Raises:
            QueryError: the result is too large.
        """
        import pyarrow as pa

        kept, size_bytes = [], 0
        for batch in batches:
            size_bytes += batch.nbytes
            self.check_size(size_bytes)
            kept.append(batch)
        return pa.Table.from_batches(kept, batches.schema)


class _Watcher(threading.Thread):
    """A thread that interrupts a query when its time is over, and tells how far it is."""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        timeout_s: float,
        on_progress: OnProgress | None,
        clean: Callable[[], object],
        unwanted: threading.Event,
    ) -> None:
        super().__init__(name="localtrace-query-limit", daemon=True)
        self._connection = connection
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._clean = clean
        self._unwanted = unwanted
        self.done, self.interrupted = threading.Event(), threading.Event()

    @property
    def message(self) -> str:
        """Reason why the query was stopped, and what to do about it."""
        if self._unwanted.is_set():
            return NOBODY_WAITS
        return (
            f"the query was stopped after {self._timeout_s:g} s: narrow it down, to a step "
            "or a run for example, or give it more time (--timeout-s, timeout_s=)"
        )

    def run(self) -> None:
        """Wait until the query is done; interrupt it after its time, then end the process."""
        deadline = time.monotonic() + self._timeout_s
        while (left_s := deadline - time.monotonic()) > 0 and not self._unwanted.is_set():
            if self.done.wait(min(_LOOK_INTERVAL_S, left_s)):
                return
            if self._on_progress is not None:
                share = self._connection.query_progress()
                self._on_progress(share / 100 if share >= 0 else None)
        self.interrupted.set()
        deadline = time.monotonic()
        while time.monotonic() < deadline + _STOP_S:
            self._connection.interrupt()  # again: one that comes between two statements is lost
            if self.done.wait(_LOOK_INTERVAL_S):
                return
        end_process(self.message, self._clean)
