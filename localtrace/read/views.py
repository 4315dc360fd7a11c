"""The views of `sql/*.sql`, made in a connection as queries need them.

This module knows nothing of stores or settings.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from localtrace.errors import StoreError
from localtrace.read.sql_errors import one_line

if TYPE_CHECKING:
    import duckdb

_DEFINITION = re.compile(r"create \w+ (?P<name>[\w.]+).*?\bas\s(?P<body>.*)", re.DOTALL)
_COMMENT = re.compile(r"--[^\n]*")
_NAME = re.compile(r"(?:stored\.)?\w+")
_LISTING = re.compile(
    r"information_schema|duckdb_(views|tables|columns|functions)|pg_catalog", re.IGNORECASE
)
"""Texts that list the views, which must all be there then."""
_NEEDED = re.compile(r"\b(?:from|join)\s+((?:stored\.)?\w+)|\b(\w+)\(")
"""The names of views and of functions in a text. The files of `sql` always name them so."""


Make = Callable[["duckdb.DuckDBPyConnection"], object]
_Definition = tuple[Make, Iterable[str]]
"""The maker of a view or a function, and the names of others that it may read."""


class Views:
    """The views and functions of a database, each made when a query first names it.

    To make a view, DuckDB opens every file that the view reads, and most queries need few views.
    Threads may share an instance, each with a connection of its own.
    """

    def __init__(
        self,
        leaves: Mapping[str, str],
        branches: Mapping[str, str],
        functions: Mapping[str, Make],
    ) -> None:
        """Take note of all that can be made.

        Args:
            leaves: SELECTs of views of the schema `stored` that read no other views, by name.
            branches: SELECTs of views of that schema that read others, by name.
            functions: makers of functions that are not SQL, by name.
        """
        self._making = threading.Lock()
        self._waiting: dict[str, _Definition] = {
            name: (make, ()) for name, make in functions.items()
        }
        for name, select in leaves.items():
            self._add(f"stored.{name}", f"create view stored.{name} as {select}", "")
        for name, select in branches.items():
            self._add(f"stored.{name}", f"create view stored.{name} as {select}", select)
        for statement in _statements():
            match = _DEFINITION.match(statement)
            assert match is not None
            self._add(match["name"], statement, match["body"])

    def _add(self, name: str, statement: str, body: str) -> None:
        needs = (view or function for view, function in _NEEDED.findall(body))
        self._waiting[name] = partial(_execute, statement=statement), {*needs} - {name}

    def provide(self, sql: str, connection: duckdb.DuckDBPyConnection) -> None:
        """Make the views and functions that a query may name, and those that these need.

        Args:
            sql: the query.
            connection: where to make them.

        Raises:
            StoreError: a file cannot be read.
        """
        if _LISTING.search(sql):
            self.provide_all(connection)
        self._make(_NAME.findall(sql.lower()), connection)

    def provide_all(self, connection: duckdb.DuckDBPyConnection) -> bool:
        """Make all that is not made yet, and return whether there was any.

        Raises:
            StoreError: a file cannot be read.
        """
        waited = bool(self._waiting)
        self._make(list(self._waiting), connection)
        return waited

    def _make(self, names: Iterable[str], connection: duckdb.DuckDBPyConnection) -> None:
        # Queries whose views are there do not wait for others whose views are being made.
        if missing := [name for name in names if name in self._waiting]:
            with self._making:
                self._make_each(missing, connection)

    def _make_each(self, names: Iterable[str], connection: duckdb.DuckDBPyConnection) -> None:
        import duckdb

        for name in names:
            if name not in self._waiting:
                continue
            make, needs = self._waiting[name]
            self._make_each(needs, connection)
            try:
                make(connection)
            except duckdb.InterruptException:
                raise
            except duckdb.Error as error:
                raise StoreError(
                    f"{name} cannot be read ({one_line(error)}): run localtrace verify"
                ) from error
            del self._waiting[name]


def _execute(connection: duckdb.DuckDBPyConnection, statement: str) -> None:
    connection.execute(statement)


def views_text() -> str:
    """Return the files of `sql` as one text."""
    paths = sorted(Path(__file__).with_name("sql").glob("*.sql"))
    return "\n".join(path.read_text("utf-8") for path in paths)


def select_of(view: str) -> str:
    """Return the SELECT of a view of the schema `main`."""
    definitions = filter(None, map(_DEFINITION.match, _statements()))
    return next(match["body"] for match in definitions if match["name"] == view)


@cache
def _statements() -> list[str]:
    return list(filter(None, map(str.strip, _COMMENT.sub("", views_text()).split(";\n"))))
