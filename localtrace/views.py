"""A DuckDB connection over one look at one or several stores, with the views of `views.sql`.

The connection cannot write, reads no file outside its snapshots, loads no extension and keeps its
settings locked. This module knows nothing of filters, named queries or records.
"""

from __future__ import annotations

import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from localtrace.errors import StoreError
from localtrace.gathered import gathered_views, outcome_views
from localtrace.sqltext import one_line
from localtrace.stored import list_literal, stored_views, text_literal, unsealed_rows

if TYPE_CHECKING:
    import duckdb

    from localtrace.store.snapshot import Copies

PieceOf = Callable[[str | None, int | None], str | None]
_SPILL_MAX_BYTES = 16 * 2**30
"""The disk may be one that training needs."""
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
}
_DEFINITION = re.compile(
    r"create (?P<kind>\w+) (?P<name>[\w.]+).*?\bas(?P<table> table)?\s(?P<select>.*)", re.DOTALL
)
_COMMENT = re.compile(r"--[^\n]*")
_WORD = re.compile(r"\w+")
_LISTING = re.compile(r"information_schema|duckdb_(views|tables|columns)|pg_catalog", re.IGNORECASE)
"""What lists the views."""
_NEEDED = re.compile(r"\b(?:from|join)\s+((?:stored\.)?\w+)")
"""The views that the text of a view names: those of this folder name them in this way."""


def connect(
    stores: Sequence[Copies], memory_max_bytes: int, piece_of: PieceOf
) -> tuple[duckdb.DuckDBPyConnection, Views]:
    """Open an in-memory database over one look at one or several stores, and lock it.

    Args:
        stores: what to show.
        memory_max_bytes: what queries may hold in memory; more goes to a temporary folder.
        piece_of: the text of a token by run id and token id, null where either is; several threads
            call it. It must not hold the connection, which would never be freed.

    Raises:
        StoreError: a folder above a store is named like a partition, which DuckDB would take for
            one.
    """
    import duckdb

    connection = duckdb.connect(":memory:", config=_CONFIG)
    connection.execute("create schema stored")
    for name, rows in unsealed_rows(stores).items():
        connection.register(name, rows)
    _offer_pieces(connection, piece_of)
    leaves = stored_views(stores) | gathered_views(stores)
    views = Views(connection, leaves, outcome_views(stores))
    _lock(connection, stores, memory_max_bytes)
    return connection, views


def _offer_pieces(connection: duckdb.DuckDBPyConnection, piece_of: PieceOf) -> None:
    import duckdb
    from duckdb.func import SPECIAL

    try:
        connection.create_function(
            "piece_of", piece_of, ["VARCHAR", "BIGINT"], "VARCHAR", null_handling=SPECIAL
        )
    except duckdb.InvalidInputException:  # DuckDB calls Python only where NumPy is installed
        connection.execute("create macro piece_of(run_id, id) as null::varchar")


_Definition = tuple[str, Iterable[str]]
"""A statement, and the views that it needs."""


class Views:
    """The views of a connection, each made when a query first names it.

    To make one, DuckDB looks at every file that it reads, and most queries need few of them.
    """

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        leaves: dict[str, str],
        branches: dict[str, str],
    ) -> None:
        """Make the scalar macros; the rest waits.

        Args:
            connection: where to make them.
            leaves: SELECTs of views of the schema `stored` that are made of no others.
            branches: the same of views that are.
        """
        self._connection = connection
        self._waiting: dict[str, _Definition] = {}
        for name, select in leaves.items():
            self._waiting[f"stored.{name}"] = f"create view stored.{name} as {select}", ()
        for name, select in branches.items():
            needs = _NEEDED.findall(select)
            self._waiting[f"stored.{name}"] = f"create view stored.{name} as {select}", needs
        for statement in _statements():
            match = _DEFINITION.match(statement)
            assert match is not None
            if match["kind"] == "macro" and not match["table"]:
                connection.execute(statement)
            else:
                self._waiting[match["name"]] = statement, _NEEDED.findall(match["select"])

    def provide(self, sql: str) -> None:
        """Make the views that a text may name, and those that they are made of.

        Raises:
            StoreError: a file cannot be read.
        """
        if _LISTING.search(sql):
            self.provide_all()
        words = set(_WORD.findall(sql.lower()))
        self._make(name for name in self._waiting if name.rpartition(".")[2] in words)

    def provide_all(self) -> bool:
        """Make all that wait; False where none does.

        Raises:
            StoreError: a file cannot be read.
        """
        return self._make(self._waiting)

    def _make(self, names: Iterable[str]) -> bool:
        import duckdb

        made = [name for name in list(names) if name in self._waiting]
        for name in made:
            statement, needs = self._waiting.pop(name, ("", ()))
            self._make(needs)
            try:
                self._connection.execute(statement)
            except duckdb.Error as error:
                self._waiting[name] = (statement, needs)
                raise StoreError(
                    f"{name} cannot be read ({one_line(error)}): run localtrace verify"
                ) from error
        return bool(made)


@cache
def _statements() -> list[str]:
    text = _COMMENT.sub("", Path(__file__).with_name("views.sql").read_text("utf-8"))
    return list(filter(None, map(str.strip, text.split(";\n"))))


def _lock(
    connection: duckdb.DuckDBPyConnection, stores: Sequence[Copies], memory_max_bytes: int
) -> None:
    # What does not fit in memory goes to a folder that DuckDB makes only then, and removes.
    spill = Path(tempfile.gettempdir()) / f"localtrace-{uuid.uuid4().hex}"
    files = [path for snapshot in chain(*stores) for path in snapshot.paths()]
    connection.execute(f"set temp_directory = {text_literal(str(spill))}")
    connection.execute(f"set max_temp_directory_size = '{_SPILL_MAX_BYTES}B'")
    connection.execute(f"set memory_limit = '{memory_max_bytes}B'")
    connection.execute("set enable_progress_bar = true")  # for query_progress()
    connection.execute("set enable_progress_bar_print = false")
    connection.execute("set TimeZone = 'UTC'")
    connection.execute("set parquet_metadata_cache = true")
    connection.execute("set allocator_flush_threshold = '1MB'")
    connection.execute(f"set allowed_paths = {list_literal(files)}")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")
