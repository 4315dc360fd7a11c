"""Named queries, one `.sql` file each, and the rule for what user SQL may be.

The first comment line of a file is its description; the second names the parameters, as in
`-- params: run (optional), step`. The body is one SELECT with DuckDB's own `$name` parameters; an
optional parameter that is not given is null. This module knows nothing of stores.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localtrace.errors import QueryError
from localtrace.sqltext import one_line, without_explain

if TYPE_CHECKING:
    import duckdb

OWN_QUERIES = Path(__file__).parent / "queries"
"""The folder of the queries that come with localtrace."""

_PARAMETER = re.compile(r"\s*(\w+)\s*(\(optional\))?\s*")


@dataclass(frozen=True, slots=True)
class NamedQuery:
    """One query file."""

    name: str
    description: str
    parameters: dict[str, bool]
    """By name, true where the parameter must be given."""
    sql: str

    def bind(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all parameters, None for optional ones that were not given.

        Raises:
            QueryError: a parameter is missing or unknown.
        """
        usage = f"{self.name} takes {', '.join(self.parameters) or 'no parameters'}"
        for name in values:
            if name not in self.parameters:
                raise QueryError(
                    f"no parameter is called {name!r}{_hint(name, self.parameters)}: {usage}"
                )
        missing = [
            name for name, needed in self.parameters.items() if needed and name not in values
        ]
        if missing:
            raise QueryError(f"query {self.name} needs {missing[0]}=…: {usage}")
        return {name: values.get(name) for name in self.parameters}


def load_queries(folders: Iterable[Path] = ()) -> dict[str, NamedQuery]:
    """Read localtrace's own queries and those of more folders, the last of a name winning.

    Raises:
        QueryError: a folder does not exist, or a file lacks its two comment lines.
    """
    queries = {}
    for folder in (OWN_QUERIES, *folders):
        if not folder.is_dir():
            raise QueryError(f"no folder of queries at {folder}: name one that holds .sql files")
        for path in sorted(folder.glob("*.sql")):
            queries[path.stem] = _read(path)
    return queries


def find_query(name: str, folders: Iterable[Path] = ()) -> NamedQuery:
    """Read one query.

    Raises:
        QueryError: no query has this name.
    """
    queries = load_queries(folders)
    if name not in queries:
        raise QueryError(
            f"no query is called {name!r}{_hint(name, queries)}: there are {', '.join(queries)}"
        )
    return queries[name]


def check_read_only(sql: str, connection: duckdb.DuckDBPyConnection) -> None:
    """Refuse everything but one SELECT, or an EXPLAIN of one.

    Args:
        sql: the text.
        connection: what reads it; nothing is run.

    Raises:
        QueryError: the text is something else, or cannot be parsed.
    """
    import duckdb

    # EXPLAIN ANALYZE runs what it explains, so that has to be a SELECT too.
    try:
        statements = connection.extract_statements(without_explain(sql))
    except duckdb.Error as error:
        raise QueryError(one_line(error, sql)) from None
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise QueryError("only one SELECT can be run on a store: write one, such as FROM runs")


def _read(path: Path) -> NamedQuery:
    sql = path.read_text("utf-8")
    lines = sql.splitlines()
    if len(lines) < 2 or not lines[0].startswith("-- ") or not lines[1].startswith("-- params:"):
        raise QueryError(
            f"{path} must begin with two comment lines: '-- what it shows' and '-- params: …'"
        )
    parameters = {}
    for text in filter(str.strip, lines[1].removeprefix("-- params:").split(",")):
        match = _PARAMETER.fullmatch(text)
        if match is None:
            raise QueryError(f"{path}: cannot read the parameter {text.strip()!r} in line 2")
        parameters[match[1]] = match[2] is None
    return NamedQuery(path.stem, lines[0].removeprefix("-- ").strip(), parameters, sql)


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f", did you mean {close[0]}?" if close else ""
