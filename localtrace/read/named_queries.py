"""Named queries, one `.sql` file each.

The comment lines of a query file are described in `queries/README.md`. Its body is one SELECT with
DuckDB's own `$name` parameters, and `$name_from` and `$name_to` for the two ends of a range.
Parameters that are not given are null. This module knows nothing of stores.
"""

from __future__ import annotations

import difflib
import re
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localtrace.errors import QueryError
from localtrace.read.filters import NUMERIC, Filters

OWN_QUERIES = Path(__file__).parents[1] / "queries"
"""The folder of the queries that come with localtrace."""

_PARAMETERS = re.compile(r",(?![^(]*\))")
"""Commas outside of brackets."""
_PARAMETER = re.compile(r"\s*(\w+)\s*(?:\(([\w ,]*)\))?\s*")
_MARKS = frozenset({"optional", "range"})
_PLOT = "-- plot:"
_NEED = re.compile(r"-- needs: (.+) <- (.+)")
_VALUE = re.compile(r"\$(\w+)")

_ENDS = {
    "=": (True, True, 0), ">=": (True, False, 0), ">": (True, False, 1),
    "<=": (False, True, 0), "<": (False, True, -1),
}  # fmt: skip
"""By operator: whether it sets the low end, the high end, and what to add to the number."""


@dataclass(frozen=True, slots=True)
class Plot:
    """The columns that a plot of a query draws."""

    x: str
    y: tuple[str, ...]
    """Columns that are drawn over each other."""
    by: tuple[str, ...] = ()
    """Columns that tell the lines of the plot apart."""


@dataclass(frozen=True, slots=True)
class Need:
    """Data that a query needs."""

    text: str
    """The data in words."""
    sql: str
    """A SELECT that finds a row where such data was recorded."""

    def bind(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a query's bound values that the SQL names."""
        named = set(_VALUE.findall(self.sql))
        return {name: value for name, value in values.items() if name in named}


@dataclass(frozen=True, slots=True)
class NamedQuery:
    """One query file."""

    name: str
    description: str
    parameters: dict[str, bool]
    """The parameters by name; true where one must be given."""
    sql: str
    ranges: frozenset[str] = frozenset()
    """Parameters that take a range of whole numbers, as the filters of these names do."""
    plot: Plot | None = None
    needs: tuple[Need, ...] = ()

    @property
    def usage(self) -> str:
        """The parameters, with optional ones in brackets."""
        return " ".join(name if needed else f"[{name}]" for name, needed in self.parameters.items())

    def bind(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all parameters, None for optional ones that were not given.

        Raises:
            QueryError: a parameter is missing or unknown.
        """
        usage = f"{self.name} takes {self.usage or 'no parameters'}"
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
        plain = {name: values.get(name) for name in self.parameters if name not in self.ranges}
        ends = (_ends(name, values.get(name)) for name in self.parameters if name in self.ranges)
        return dict(ChainMap(plain, *ends))


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


def _read(path: Path) -> NamedQuery:
    sql = path.read_text("utf-8")
    lines = sql.splitlines()
    if len(lines) < 2 or not lines[0].startswith("-- ") or not lines[1].startswith("-- params:"):
        raise QueryError(
            f"{path} must begin with two comment lines: '-- what it shows' and '-- params: …'"
        )
    parameters, ranges = _parameters(path, lines[1])
    plot = next((_plot(path, line) for line in lines if line.startswith(_PLOT)), None)
    description = lines[0].removeprefix("-- ").strip()
    needs = tuple(Need(*match.groups()) for match in map(_NEED.fullmatch, lines) if match)
    return NamedQuery(path.stem, description, parameters, sql, ranges, plot, needs)


def _parameters(path: Path, line: str) -> tuple[dict[str, bool], frozenset[str]]:
    """Return whether each parameter must be given, and the parameters that take a range."""
    parameters: dict[str, bool] = {}
    ranges = set()
    for text in filter(str.strip, _PARAMETERS.split(line.removeprefix("-- params:"))):
        match = _PARAMETER.fullmatch(text)
        marks = {mark.strip() for mark in (match[2] or "").split(",")} - {""} if match else set()
        if match is None or not marks <= _MARKS:
            raise QueryError(f"{path}: cannot read the parameter {text.strip()!r} in line 2")
        name = match[1]
        parameters[name] = "optional" not in marks
        if "range" in marks:
            ranges.add(name)
            if NUMERIC.get(name) is not int:
                known = ", ".join(key for key, kind in NUMERIC.items() if kind is int)
                raise QueryError(f"{path}: {name} cannot be a range, only {known} can")
    return parameters, frozenset(ranges)


def _plot(path: Path, line: str) -> Plot:
    words = dict(word.partition("=")[::2] for word in line.removeprefix(_PLOT).split())
    if not {"x", "y"} <= words.keys() <= {"x", "y", "by"}:
        raise QueryError(f"{path}: write {line!r} as  -- plot: x=step y=mean_reward by=run_id")
    lists = {key: tuple(filter(None, words.get(key, "").split(","))) for key in ("y", "by")}
    return Plot(words["x"], **lists)


def _ends(name: str, value: Any) -> dict[str, int | None]:
    """Return both ends of a range, which are included; None where it is open."""
    low: int | None = None
    high: int | None = None
    for term in Filters(**{name: value}).terms:
        if term.operator not in _ENDS or not isinstance(term.value, int):
            raise QueryError(f"{term}: {name} takes one range here, such as {name}=3..10")
        takes_low, takes_high, beyond = _ENDS[term.operator]
        low = term.value + beyond if takes_low else low
        high = term.value + beyond if takes_high else high
    return {f"{name}_from": low, f"{name}_to": high}


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f", did you mean {close[0]}?" if close else ""
