"""Open a store for reading: SQL over its views, filtered lists, and whole trajectories.

A store that was opened shows one moment, sealed files and live journals alike, until `refresh`.
Reading writes nothing into the store and needs no permission to. One `Store` serves one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import duckdb

from localtrace.errors import MissingDependency, QueryError, StoreError
from localtrace.filters import Filters
from localtrace.limits import BATCH_ROWS, Limits, OnProgress
from localtrace.schema import TABLES
from localtrace.sql import check_read_only, find_query
from localtrace.sqltext import explaining, one_line
from localtrace.store.layout import StoreLayout, open_layout, read_meta
from localtrace.store.snapshot import Snapshot, take_snapshot
from localtrace.store.tokenizers import text_decoder
from localtrace.trajectories import read_batch
from localtrace.types import Trajectory
from localtrace.views import connect

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Result:
    """The rows of a query, in memory."""

    _table: pa.Table

    @property
    def columns(self) -> list[str]:
        """Column names in order."""
        return list(self._table.column_names)

    def to_arrow(self) -> pa.Table:
        """The rows as an Arrow table."""
        return self._table

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a pandas data frame."""
        try:
            return self._table.to_pandas()
        except ImportError:
            raise MissingDependency("pandas is not installed: run  pip install pandas") from None

    def to_polars(self) -> polars.DataFrame:
        """The rows as a Polars data frame."""
        try:
            import polars
        except ImportError:
            raise MissingDependency("polars is not installed: run  pip install polars") from None
        return polars.DataFrame(polars.from_arrow(self._table))

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as one dict each."""
        return list(self._table.to_pylist())


class Store:
    """A store opened for reading; see `open_store`."""

    def __init__(
        self,
        layout: StoreLayout,
        snapshot: Callable[[], Snapshot],
        limits: Limits | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._layout = layout
        self._limits = limits or Limits()
        self._on_progress = on_progress
        self._take_snapshot = snapshot
        self._snapshot, self._connection = self._connect()
        self._decode = text_decoder(layout)

    @property
    def path(self) -> Path:
        """The folder of the store."""
        return self._layout.root

    @property
    def is_bundle(self) -> bool:
        """Whether this is a bundle, which somebody brought, and no store."""
        return bool(self._layout.bags)

    @property
    def store_id(self) -> str:
        """Identity of the store, which its copies and bundles share."""
        return read_meta(self._layout).store_id

    @property
    def snapshot(self) -> Snapshot:
        """What is read: sealed files, and the rows of journals that are not sealed yet."""
        return self._snapshot

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the results that were handed out stay valid."""
        self._connection.close()

    def refresh(self) -> None:
        """Look at the store as it is now."""
        before = self._connection
        self._snapshot, self._connection = self._connect()
        before.close()

    def sql(self, sql: str, params: Mapping[str, Any] | Sequence[Any] | None = None) -> Result:
        """Run one SELECT over the views.

        Args:
            sql: DuckDB SQL; it cannot write, read other files or change settings.
            params: values for `$name` (a mapping) or `?` (a sequence).

        Raises:
            QueryError: the text is not one SELECT, cannot be run, or takes too much time or memory.
        """
        check_read_only(sql)
        return Result(self._run(sql, params))

    def query(self, name: str, *, folders: Iterable[Path] = (), **params: Any) -> Result:
        """Run a named query.

        Args:
            name: a file of `localtrace/queries` or of `folders`, without `.sql`.
            folders: more folders of queries; they win over localtrace's own.
            params: the query's parameters.

        Raises:
            QueryError: no such query, a parameter is missing or unknown, or it cannot be run.
        """
        query = find_query(name, folders)
        return self.sql(query.sql, query.bind(params))

    def trajectories(self, **filters: Any) -> Result:
        """Trajectories that match the filters, without superseded ones; see `Filters`."""
        return self._filtered("trajectories", filters)

    def spans(self, **filters: Any) -> Result:
        """Calls that match the filters; `op`, `status` and `contains` mean the call itself."""
        return self._filtered("spans", filters)

    def outcomes(self, **filters: Any) -> Result:
        """Newest outcomes of the trajectories that match the filters."""
        return self._filtered("outcomes", filters)

    def runs(self, **filters: Any) -> Result:
        """Attempts of runs that match the filters, or that have a trajectory that does."""
        return self._filtered("runs", filters)

    def trajectory(self, trace_id: str) -> Trajectory:
        """One trajectory with its calls and newest outcomes.

        Raises:
            QueryError: the store has no such trajectory.
        """
        return next(self.read([trace_id]))

    def read(self, trace_ids: Iterable[str], batch_size: int = 64) -> Iterator[Trajectory]:
        """Read trajectories in the given order, `batch_size` of them in memory at a time.

        Raises:
            QueryError: the store has no such trajectory.
        """
        remaining = iter(trace_ids)
        while batch := list(islice(remaining, batch_size)):
            yield from read_batch(self._run, self.decode, batch)

    def decode(self, run_id: str, ids: list[int]) -> str | None:
        """Ids as text, by the tokenizer that the store keeps for a run.

        None where it keeps none, or where the package `tokenizers` is not installed.
        """
        return self._decode(run_id, ids)

    def files(self, table: str = "spans") -> list[str]:
        """The sealed Parquet files of a table, as absolute paths.

        Raises:
            QueryError: there is no such table.
        """
        if table not in TABLES:
            raise QueryError(f"no table is called {table!r}: there are {', '.join(TABLES)}")
        return list(self._snapshot.files[table])

    def _filtered(self, view: str, filters: dict[str, Any]) -> Result:
        condition, params = Filters(**filters).where_clause(view)
        order = "start_ns" if view == "runs" else ", ".join(TABLES[view].sort_by)
        sql = f"select * from {view} where {condition} order by {order}"
        return Result(self._run(sql, params))

    def _connect(self, again: bool = True) -> tuple[Snapshot, duckdb.DuckDBPyConnection]:
        snapshot = self._take_snapshot()
        try:
            return snapshot, connect(snapshot, self._limits.memory_max_bytes)
        except duckdb.Error as error:
            if again and not _has_all_files(snapshot):
                return self._connect(again=False)  # a compaction removed files since
            raise StoreError(
                f"cannot read {self.path} ({one_line(error)}): run localtrace verify"
            ) from error

    def _run(
        self, sql: str, params: Mapping[str, Any] | Sequence[Any] | None, again: bool = True
    ) -> pa.Table:
        try:
            return self._execute(sql, params)
        except QueryError:
            raise
        except (duckdb.Error, OSError) as error:  # OSError: while the rows were handed over
            if again and not _has_all_files(self._snapshot):
                self.refresh()  # a compaction removed files since
                return self._run(sql, params, again=False)
            raise QueryError(self._explained(error, sql, params)) from None

    def _execute(self, sql: str, params: Mapping[str, Any] | Sequence[Any] | None) -> pa.Table:
        # Rolled back whatever happens: a SELECT may hold a statement that writes.
        self._connection.execute("begin transaction read only")
        try:
            with self._limits.watch(self._connection, self._on_progress):
                # Streamed: a result that is too large is noticed before it fills the memory.
                found = self._connection.sql(sql, params=params)
                with found.to_arrow_reader(BATCH_ROWS) as rows:
                    return self._limits.collect(rows)
        finally:
            self._connection.execute("rollback")

    def _explained(
        self, error: Exception, sql: str, params: Mapping[str, Any] | Sequence[Any] | None
    ) -> str:
        if isinstance(error, duckdb.OutOfMemoryException):
            return (
                "the query needs more memory than there is for it: narrow it down, to a step or a "
                "run for example, or select fewer columns"
            )
        if isinstance(error, duckdb.BinderException | duckdb.CatalogException):
            # Only when it executes does DuckDB also say where in the text the mistake is.
            try:
                self._connection.execute(explaining(sql), params)
            except duckdb.Error as located:
                return one_line(located, explaining(sql))
        return one_line(error, sql)


def _has_all_files(snapshot: Snapshot) -> bool:
    return all(map(os.path.exists, chain(*snapshot.files.values())))


def open_store(
    path: str | Path, *, timeout_s: float | None = None, on_progress: OnProgress | None = None
) -> Store:
    """Open a store for reading.

    Args:
        path: its folder.
        timeout_s: seconds that one query may run, 300 when not given.
        on_progress: called during queries from another thread with the share that is done, 0 to 1,
            or None where that is unknown.

    Raises:
        StoreNotFound: nothing is there.
        StoreFormatError: it is something else, or a store of a newer format.
    """
    layout = open_layout(path)
    limits = Limits() if timeout_s is None else Limits(timeout_s)
    return Store(layout, partial(take_snapshot, layout), limits, on_progress)
