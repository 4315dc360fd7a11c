"""A runner of SQL over the stores as they were when it last looked.

It holds the connection and its limits, and looks at the stores again where files are gone. It knows
nothing of filters or records.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from typing import TYPE_CHECKING, Any

import duckdb

from localtrace.errors import QueryError, StoreError
from localtrace.read.connection import PieceOf, another, connect, offer
from localtrace.read.query_limits import BATCH_ROWS, NO_MEMORY, NOBODY_WAITS, Limits, OnProgress
from localtrace.read.read_only import check_read_only
from localtrace.read.sandbox import Sandbox
from localtrace.read.sql_errors import explaining, one_line
from localtrace.store.tables.snapshot import Copies, Snapshot

if TYPE_CHECKING:
    import pyarrow as pa

_TRIES = 5
_VERIFY = "localtrace verify says what to do"
Params = Mapping[str, Any] | Sequence[Any] | None
"""Values for `$name` (a mapping) or `?` (a sequence)."""


class QueryRunner:
    """A connection over one moment of the stores, until `refresh`.

    Args:
        look: takes the snapshots of each store.
        piece_of: the text of a token by run id and token id; see `connect`.
        limits: the time and memory of one query.
        on_progress: told how far a query is.
    """

    def __init__(
        self,
        look: Callable[[], Sequence[Copies]],
        piece_of: PieceOf,
        limits: Limits,
        on_progress: OnProgress | None,
    ) -> None:
        self.limits = limits
        self._look = look
        self._piece_of = piece_of
        self._on_progress = on_progress
        self._unwanted = threading.Event()
        self._open()

    def _open(self) -> None:
        sandbox = Sandbox()
        try:
            connecting = sandbox.start(connect)  # which takes as long as to look at the stores
            try:
                stores = self._look()
            finally:
                self._connection = connecting.result()
            self._views = offer(
                self._connection, stores, self.limits.memory_max_bytes, self._piece_of, sandbox
            )
        except BaseException:
            sandbox.close()
            raise
        self._stores, self._sandbox, self._is_guest = stores, sandbox, False

    def share(self) -> QueryRunner:
        """Return a runner over the same moment, for another thread, to be closed before this one.

        They share the database, its views and the limit of its memory.
        """
        guest = copy(self)
        guest._connection = another(self._connection, self._stores)
        guest._is_guest, guest._on_progress = True, None
        guest._unwanted = threading.Event()
        return guest

    def stop(self) -> None:
        """Stop the query that runs, and refuse others; called from another thread."""
        self._unwanted.set()

    @property
    def snapshots(self) -> list[Snapshot]:
        """The snapshots of all stores and of their copies."""
        return list(chain(*self._stores))

    def refresh(self) -> None:
        """Take new snapshots of the stores."""
        before = copy(self)
        self._open()
        before.close()

    def close(self) -> None:
        """Close the connection, and remove the temporary folder unless it is another runner's."""
        self._connection.close()
        if not self._is_guest:
            self._sandbox.close()

    def run(
        self, sql: str, params: Params = None, is_own: bool = True, tries: int = _TRIES
    ) -> pa.Table:
        """Run one SELECT.

        Args:
            sql: the text.
            params: its parameters.
            is_own: whether localtrace wrote all of it. Text of users is checked first.
            tries: how often, with new snapshots, it is run again where files are gone.

        Raises:
            QueryError: it is not one SELECT, cannot be run, or takes too much time or memory.
            StoreError: a file is missing or damaged.
        """
        try:
            return self._execute(sql, params, is_own)
        except QueryError:
            raise
        except (duckdb.Error, StoreError, OSError) as error:  # OSError: while rows are handed over
            lost = [path for path in self._paths() if not os.path.exists(path)]
            if lost and tries:
                self.refresh()  # a compaction removed files since
                if set(lost).isdisjoint(self._paths()):
                    return self.run(sql, params, is_own, tries - 1)
            if lost:
                raise StoreError(f"{lost[0]} is missing: {_VERIFY}") from None
            if isinstance(error, StoreError):
                raise
            is_unknown = isinstance(error, duckdb.CatalogException)
            if is_unknown and self._views.provide_all(self._connection):
                # The text names a view in a way that `provide` does not see.
                return self.run(sql, params, is_own)
            if self._is_damage(error):
                raise StoreError(f"{one_line(error)}: {_VERIFY}") from None
            raise QueryError(self._explained(error, sql, params)) from None

    def _execute(self, sql: str, params: Params, is_own: bool) -> pa.Table:
        connection = self._connection

        def work() -> pa.Table:
            self._views.provide(sql, connection)
            connection.execute("begin transaction read only")
            try:
                if not is_own:
                    check_read_only(sql, params, connection)
                # Streamed: a result that is too large is noticed before it fills the memory.
                found = connection.sql(sql, params=params)
                with found.to_arrow_reader(BATCH_ROWS) as rows:
                    return self.limits.collect(rows)
            finally:
                connection.execute("rollback")

        if self._unwanted.is_set():
            raise QueryError(NOBODY_WAITS)
        watched = self.limits.watch(
            connection, self._on_progress, self._sandbox.close, self._unwanted
        )
        with watched:
            return self._sandbox.run(work, connection.interrupt)

    def _is_damage(self, error: Exception) -> bool:
        """Return whether an error tells of the content of a file, and not of SQL or of rights."""
        if type(error) is duckdb.Error:  # raised for Parquet's metadata; SQL has its own classes
            return True
        said = str(error)
        return "Cannot open file" not in said and any(path in said for path in self._paths())

    def _paths(self) -> Iterator[str]:
        return chain.from_iterable(one.paths() for one in self.snapshots)

    def _explained(self, error: Exception, sql: str, params: Params) -> str:
        if isinstance(error, duckdb.OutOfMemoryException):
            return NO_MEMORY
        if isinstance(error, duckdb.BinderException | duckdb.CatalogException):
            # Only when it executes does DuckDB also say where in the text the mistake is.
            try:
                self._sandbox.run(lambda: self._connection.execute(explaining(sql), params))
            except duckdb.Error as located:
                return one_line(located, explaining(sql))
        return one_line(error, sql)
