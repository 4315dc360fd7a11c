"""A locked DuckDB connection over snapshots of one or several stores.

It reads no file outside its snapshots, loads no extension and lets nobody change its settings. This
module knows nothing of filters, named queries or records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from localtrace.read.outcome_views import late_outcomes, outcome_views
from localtrace.read.table_views import list_literal, stored_views, text_literal, unsealed_rows
from localtrace.read.views import Views

if TYPE_CHECKING:
    import duckdb

    from localtrace.store.tables.snapshot import Copies

PieceOf = Callable[[str | None, int | None], str | None]
_SPILL_MAX_BYTES = 16 * 2**30
"""The temporary files of a query, at most: training may need the disk."""
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    # DuckDB 2.0.0 takes a left join for empty where its right side is known to be, and drops the
    # LIMIT above it: `select v from t left join r on r.k = t.k where t.k = 1 limit 5` over an
    # empty r gives every row. This optimizer causes it; queries are as fast without it.
    "disabled_optimizers": "statistics_propagation",
}


def connect() -> duckdb.DuckDBPyConnection:
    """Open an in-memory database."""
    import duckdb

    return duckdb.connect(":memory:", config=_CONFIG)


def offer(
    connection: duckdb.DuckDBPyConnection,
    stores: Sequence[Copies],
    memory_max_bytes: int,
    piece_of: PieceOf,
    folder: Path | None,
) -> Views:
    """Offer snapshots of one or several stores in a database, and lock it.

    Args:
        connection: a connection that `connect` made.
        stores: the snapshots of each store.
        memory_max_bytes: the memory that queries may use; more goes to a temporary folder.
        piece_of: returns the text of a token by run id and token id, null where either is null.
            Several threads call it. It must not refer to the connection, which would never be
            freed.
        folder: holds DuckDB's temporary files; None: queries have to fit in memory.

    Raises:
        StoreError: a folder above a store is named like a partition, which DuckDB would take for
            one.
    """
    connection.execute("create schema stored")
    _offer_unsealed(connection, stores)
    leaves = stored_views(stores) | {"late_outcomes": late_outcomes(stores)}
    functions = {"piece_of": partial(_offer_pieces, piece_of=piece_of)}
    views = Views(leaves, outcome_views(stores), functions)
    _lock(connection, stores, memory_max_bytes, folder)
    return views


def another(
    connection: duckdb.DuckDBPyConnection, stores: Sequence[Copies]
) -> duckdb.DuckDBPyConnection:
    """Return another connection to the same database, for another thread.

    Args:
        connection: a connection to a database that offers snapshots.
        stores: those snapshots.
    """
    made = connection.cursor()
    _offer_unsealed(made, stores)
    return made


def _offer_unsealed(connection: duckdb.DuckDBPyConnection, stores: Sequence[Copies]) -> None:
    for name, rows in unsealed_rows(stores).items():
        connection.register(name, rows)


def _offer_pieces(connection: duckdb.DuckDBPyConnection, piece_of: PieceOf) -> None:
    import duckdb
    from duckdb.func import SPECIAL

    try:
        connection.create_function(
            "piece_of", piece_of, ["VARCHAR", "BIGINT"], "VARCHAR", null_handling=SPECIAL
        )
    except duckdb.InvalidInputException:  # DuckDB calls Python only where NumPy is installed
        connection.execute("create macro piece_of(run_id, id) as null::varchar")


def _lock(
    connection: duckdb.DuckDBPyConnection,
    stores: Sequence[Copies],
    memory_max_bytes: int,
    folder: Path | None,
) -> None:
    import duckdb

    files = [path for snapshot in chain(*stores) for path in snapshot.paths()]
    connection.execute(f"set temp_directory = {text_literal(str(folder or ''))}")
    connection.execute(f"set max_temp_directory_size = '{_SPILL_MAX_BYTES}B'")
    connection.execute(f"set memory_limit = '{memory_max_bytes}B'")
    # For query_progress(). DuckDB refuses it in Jupyter where ipywidgets is not installed.
    with contextlib.suppress(duckdb.Error):
        connection.execute("set enable_progress_bar = true")
        connection.execute("set enable_progress_bar_print = false")
    connection.execute("set global TimeZone = 'UTC'")
    connection.execute("set allocator_flush_threshold = '1MB'")
    connection.execute(f"set allowed_paths = {list_literal(files)}")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")
