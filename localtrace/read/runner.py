"""A runner of SQL over the stores as they were when it last looked.

It holds the connection and its limits, hands SQL of others to a child where the process has any,
and looks at the stores again where files are gone. It knows nothing of filters or records.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localtrace.errors import QueryError, StoreError
from localtrace.read.children import Offer, children
from localtrace.read.connection import PieceOf, another, connect, offer
from localtrace.read.query_limits import (
    BATCH_ROWS,
    NO_MEMORY,
    NOBODY_WAITS,
    Limits,
    OnProgress,
    collect_all,
    in_thread,
)
from localtrace.read.spill_folder import SpillFolder
from localtrace.read.sql_errors import explaining, one_line
from localtrace.read.views import Views
from localtrace.store.layout import StoreLayout
from localtrace.store.tables.snapshot import Copies, Snapshot

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

Collect = Callable[["pa.RecordBatchReader", Limits], "pa.Table"]
_TRIES = 5
_VERIFY = "localtrace verify says what to do"
Params = Mapping[str, Any] | Sequence[Any] | None
"""Values for `$name` (a mapping) or `?` (a sequence)."""


@dataclass(frozen=True, slots=True)
class _Database:
    """A locked database over the snapshots, in this process."""

    connection: duckdb.DuckDBPyConnection
    views: Views
    close: Callable[[], object]


class QueryRunner:
    """Queries over one moment of the stores, until `refresh`.

    Args:
        look: takes the snapshots of each store.
        layouts: the folders of the stores.
        piece_of: the text of a token by run id and token id; see `offer`.
        limits: the time and memory of one query; the default ones when not given.
        on_progress: told how far a query is.
        collect: takes in the rows of a query within limits, and returns those to hand out.
        folder: for temporary files; one of its own when not given.
    """

    def __init__(
        self,
        look: Callable[[], Sequence[Copies]],
        layouts: Sequence[StoreLayout],
        piece_of: PieceOf,
        limits: Limits | None,
        on_progress: OnProgress | None,
        collect: Collect = collect_all,
        folder: Path | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._look = look
        self._layouts = layouts
        self._piece_of = piece_of
        self._on_progress = on_progress
        self._collect = collect
        self._folder = folder
        self._children = children()
        self._unwanted = threading.Event()
        self._open()

    def _open(self) -> None:
        is_late = self._children is not None and self._children.run_all
        # To connect takes as long as to look at the stores.
        connecting = None if is_late else in_thread(connect)[1]
        try:
            stores = self._look()
        finally:
            connection = connecting.result() if connecting else None
        self._database = self._over(stores, connection) if connection else None
        self._stores = stores
        places = self._children.places if self._children else 1
        each = replace(self.limits, memory_max_bytes=self.limits.memory_max_bytes // places)
        self._offer = Offer(self._layouts, stores, each)

    def _over(self, stores: Sequence[Copies], connection: duckdb.DuckDBPyConnection) -> _Database:
        spill = SpillFolder() if self._folder is None else None
        folder = spill.path if spill else self._folder

        def close() -> None:
            connection.close()
            if spill:
                spill.close()

        try:
            views = offer(connection, stores, self.limits.memory_max_bytes, self._piece_of, folder)
        except BaseException:
            close()
            raise
        return _Database(connection, views, close)

    def _own(self) -> _Database:
        if self._database is None:
            self._database = self._over(self._stores, connect())
        return self._database

    def share(self) -> QueryRunner:
        """Return a runner over the same moment, for another thread, to be closed before this one.

        They share the database, its views and the limit of its memory.
        """
        guest, own = copy(self), self._own()
        connection = another(own.connection, self._stores)
        guest._database = _Database(connection, own.views, connection.close)
        guest._on_progress = None
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
        if self._database is not None:
            self._database.close()

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
        except Exception as error:
            import duckdb

            if not isinstance(error, duckdb.Error | StoreError | OSError):
                raise  # OSError: while rows are handed over
            lost = [path for path in self._paths() if not os.path.exists(path)]
            if lost and tries:
                self.refresh()  # a compaction removed files since
                if set(lost).isdisjoint(self._paths()):
                    return self.run(sql, params, is_own, tries - 1)
            if lost:
                raise StoreError(f"{lost[0]} is missing: {_VERIFY}") from None
            if isinstance(error, StoreError):
                raise
            own = self._own()
            is_unknown = isinstance(error, duckdb.CatalogException)
            if is_unknown and own.views.provide_all(own.connection):
                # The text names a view in a way that `provide` does not see.
                return self.run(sql, params, is_own)
            if self._is_damage(error):
                raise StoreError(f"{one_line(error)}: {_VERIFY}") from None
            raise QueryError(self._explained(error, sql, params)) from None

    def _execute(self, sql: str, params: Params, is_own: bool) -> pa.Table:
        if self._unwanted.is_set():
            raise QueryError(NOBODY_WAITS)
        if self._children is not None and not is_own:
            return self._children.ask(self._offer, sql, params, self._on_progress, self._unwanted)
        from localtrace.read.read_only import check_read_only  # it imports DuckDB

        own = self._own()
        connection = own.connection

        def work() -> pa.Table:
            own.views.provide(sql, connection)
            connection.execute("begin transaction read only")
            try:
                if not is_own:
                    check_read_only(sql, params, connection)
                # Streamed: a result that is too large is noticed before it fills the memory.
                found = connection.sql(sql, params=params)
                with found.to_arrow_reader(BATCH_ROWS) as rows:
                    return self._collect(rows, self.limits)
            finally:
                connection.execute("rollback")

        return self.limits.run(work, connection, self._on_progress, self._unwanted)

    def _is_damage(self, error: Exception) -> bool:
        """Return whether an error tells of the content of a file, and not of SQL or of rights."""
        import duckdb

        if type(error) is duckdb.Error:  # raised for Parquet's metadata; SQL has its own classes
            return True
        said = str(error)
        return "Cannot open file" not in said and any(path in said for path in self._paths())

    def _paths(self) -> Iterator[str]:
        return chain.from_iterable(one.paths() for one in self.snapshots)

    def _explained(self, error: Exception, sql: str, params: Params) -> str:
        import duckdb

        # Arrow hands DuckDB's errors on as its own.
        if isinstance(error, duckdb.OutOfMemoryException) or "Out of Memory" in str(error):
            return NO_MEMORY
        if isinstance(error, duckdb.BinderException | duckdb.CatalogException):
            # Only when it executes does DuckDB also say where in the text the mistake is.
            try:
                self._own().connection.execute(explaining(sql), params)
            except duckdb.Error as located:
                return one_line(located, explaining(sql))
        return one_line(error, sql)
