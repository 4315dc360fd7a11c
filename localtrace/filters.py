"""The filters that every way of reading shares: `step=3..10`, `reward<0.1`, `contains=text`.

A filter is a keyword argument in Python and the text `key=value` elsewhere; both become the same
parameterised condition. All of them must hold; on the command line a key may be repeated. Values
are compared as DuckDB does: null matches nothing, and NaN is above every number.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from localtrace.errors import QueryError
from localtrace.sqltext import WHERE_MARK, one_line

KEYS = (
    "run", "project", "experiment", "attempt", "step", "sample_index", "rollout_n", "group",
    "validate", "agent", "data_source", "reward", "fate", "status", "op", "contains", "truncated",
    "empty", "duplicate", "tool_errors", "repetition", "where",
)  # fmt: skip
"""Every filter, in the order in which help lists them."""

COLUMNS = {key: key for key in KEYS} | {"run": "run_id", "group": "group_id"}
"""The column that a filter is about."""
_DETECTORS = ("truncated", "empty", "duplicate", "tool_errors", "repetition")
OTHER_VIEWS = {"op": "spans", "contains": "spans"} | dict.fromkeys(_DETECTORS, "detectors")
"""The view of that column, where it is not `trajectories`."""
NUMERIC: dict[str, Callable[[str], int | float]] = {
    "attempt": int,
    "step": int,
    "rollout_n": int,
    "reward": float,
    "tool_errors": int,
    "repetition": float,
}
"""Filters on numbers, and how each is read."""
_FLAGS = frozenset({"validate", "truncated", "empty", "duplicate"})
_SPAN_KEYS = frozenset(
    {"run", "project", "experiment", "attempt", "step", "sample_index", "rollout_n"}
)
_DIRECT = {
    "trajectories": frozenset(KEYS) - OTHER_VIEWS.keys(),
    "spans": _SPAN_KEYS | {"op", "status", "contains", "where"},
    "tokens": _SPAN_KEYS | {"where"},
    "outcomes": frozenset({"run", "project", "experiment", "where"}),
    "runs": frozenset({"run", "project", "experiment", "attempt", "where"}),
}
"""Per view the filters that its own columns answer; the others ask `trajectories`."""
_LATE_KEYS = frozenset({"reward", "fate", "where"})
"""Filters that may ask for values that arrive later than the trajectory."""
_LINKS = dict.fromkeys(("spans", "tokens", "outcomes"), "trace_id") | {"runs": "run_id, attempt"}
_SHARED = {
    "spans": _SPAN_KEYS,
    "tokens": _SPAN_KEYS,
    "runs": frozenset({"run", "attempt"}),
    # Only what a whole group shares: a duplicate is one beside all others of its group.
    "detectors": frozenset({"run", "project", "experiment", "step"}),
}
"""Filters that are as true of a view's row as of its trajectory.

They are said of both, so that DuckDB skips the files of other steps.
"""

_TERM = re.compile(r"\s*(\w+)\s*(<=|>=|=|<|>)(.*)", re.DOTALL)
_COMPARISON = re.compile(r"\s*(<=|>=|=|<|>)?\s*(.*?)\s*", re.DOTALL)
_TEXT_COLUMNS = ("output_text", "prompt_text")
_JSON_COLUMNS = ("messages", "inputs", "outputs")


@dataclass(frozen=True, slots=True)
class Term:
    """One condition: a filter's key, =, <, <=, > or >=, and the value."""

    key: str
    operator: str
    value: str | int | float | bool

    def __str__(self) -> str:
        """The condition as it is written on the command line."""
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"{self.key}{self.operator}{value}"


_Named: TypeAlias = list[tuple[str, Term]]
"""Conditions and the names of their parameters."""


@dataclass(frozen=True, slots=True, init=False)
class Filters:
    """A set of filters that must all hold.

    Numbers (`attempt`, `step`, `rollout_n`, `reward`, `tool_errors`, `repetition`) take a number, a
    range ("3..10", both ends included, either may be left out) or a comparison ("<0.1").
    `validate`, `truncated`, `empty` and `duplicate` take true or false. `contains` searches,
    case-sensitively, the texts of a trajectory's calls: prompts, outputs, messages, inputs and
    results, the last three as JSON. `op` asks for trajectories with a call of that name. `where` is
    a free SQL condition on the columns of the view that is read. Every other key must be equal. A
    value of None is no filter.

    `truncated`, `empty`, `duplicate`, `tool_errors` and `repetition` are columns of the view
    `detectors`, which has a row for every trajectory with a generation. Without one a trajectory
    has no answer to judge, so neither `truncated` true nor false finds it. `duplicate` compares
    with all rollouts of the group, whatever else is filtered.

    Raises:
        QueryError: a key is unknown, or a value is of another type.
    """

    terms: tuple[Term, ...]

    def __init__(self, **values: Any) -> None:
        given = ((key, value) for key, value in values.items() if value is not None)
        self._set(term for key, value in given for term in _terms(key, value))

    def _set(self, terms: Iterable[Term]) -> None:
        object.__setattr__(self, "terms", tuple(terms))

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Filters:
        """Read filters from text such as `step=3..10` or `reward<0.1`.

        Raises:
            QueryError: a text is not a filter, names no known key, or has a value of another type.
        """
        filters = cls()
        filters._set(term for text in texts for term in _parse(text))
        return filters

    def __str__(self) -> str:
        """The filters as they are written on the command line."""
        return " ".join(map(str, self.terms))

    @property
    def knows_table(self) -> bool:
        """Whether columns of the table `trajectories` answer all of them, without outcomes."""
        return not any(term.key in _LATE_KEYS for term in self.terms)

    def by_key(self) -> dict[str, Filters]:
        """The filters of each key on their own."""
        alone = {term.key: Filters() for term in self.terms}
        for key, filters in alone.items():
            filters._set(term for term in self.terms if term.key == key)
        return alone

    def where_clause(self, view: str = "trajectories") -> tuple[str, dict[str, Any]]:
        """The condition for a query on a view, and its parameters by name.

        Args:
            view: trajectories, spans, tokens, outcomes or runs. On spans, tokens and outcomes the
                condition also leaves out what belongs to superseded trajectories.
        """
        named = [(f"filter_{number}", term) for number, term in enumerate(self.terms)]
        params: dict[str, Any] = {}
        for name, term in named:
            params |= _params(name, term)
        return _clause(view, named), params


def is_filter(text: str) -> bool:
    """Whether a text is written like a filter: a word, a comparison sign, a value."""
    return _TERM.fullmatch(text) is not None


def _clause(view: str, named: _Named) -> str:
    conditions = [_condition(*one) for one in named if one[1].key in _DIRECT[view]]
    beyond = [one for one in named if one[1].key not in _DIRECT[view]]
    if view == "trajectories":
        for other, asked in _elsewhere(beyond):
            inner = [_condition(*one) for one in (*_shared(other, named), *asked)]
            conditions.append(_linked("trace_id", other, " and ".join(inner)))
    elif beyond:
        inner_clause = _clause("trajectories", [*_shared(view, named), *beyond])
        conditions.append(_linked(_LINKS[view], "trajectories", inner_clause))
    elif view != "runs":
        conditions.append("trace_id not in (select trace_id from superseded)")
    return " and ".join(conditions) or "true"


def _elsewhere(beyond: _Named) -> list[tuple[str, _Named]]:
    """What one row of another view must be: each call on its own, all detectors together."""
    calls = [("spans", [one]) for one in beyond if OTHER_VIEWS[one[1].key] == "spans"]
    detectors = [one for one in beyond if OTHER_VIEWS[one[1].key] == "detectors"]
    return [*calls, ("detectors", detectors)] if detectors else calls


def _shared(view: str, named: _Named) -> _Named:
    return [one for one in named if one[1].key in _SHARED.get(view, ())]


def _linked(link: str, view: str, condition: str) -> str:
    # Where the outer view joins laterally, DuckDB filters before it joins only if told like this:
    # `in` is several times slower.
    names = link.split(", ")
    columns = ", ".join(f"{name} as of_{name}" for name in names)
    same = " and ".join(f"of_{name} = {name}" for name in names)
    return f"exists (select 1 from (select {columns} from {view} where {condition}) where {same})"


def _condition(name: str, term: Term) -> str:
    if term.key == "where":
        return f"({WHERE_MARK}{term.value}\n)"  # the line ends a trailing comment
    if term.key == "contains":
        texts = [f"contains({column}, ${name})" for column in _TEXT_COLUMNS]
        texts += [f"contains({column}, ${name}_json)" for column in _JSON_COLUMNS]
        return f"({' or '.join(texts)})"
    return f"{COLUMNS[term.key]} {term.operator} ${name}"


def _params(name: str, term: Term) -> dict[str, Any]:
    if term.key == "where":
        return {}
    if term.key == "contains":
        quoted = msgspec.json.encode(term.value).decode()
        return {name: term.value, f"{name}_json": quoted[1:-1]}
    return {name: term.value}


def _parse(text: str) -> list[Term]:
    match = _TERM.fullmatch(text)
    if match is None:
        raise QueryError(
            f"{text!r} is not a filter: write key=value, such as step=3..10 or 'reward<0.1' "
            f"({_known()})"
        )
    key, operator, value = match.groups()
    if operator == "=":
        return _terms(key, value)
    if key in KEYS and key not in NUMERIC:
        raise QueryError(f"{text!r}: {key} can only be compared with =")
    return _terms(key, operator + value)


def _terms(key: str, value: Any) -> list[Term]:
    if key not in KEYS:
        close = difflib.get_close_matches(key, KEYS, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise QueryError(f"no filter is called {key!r}: {hint}({_known()})")
    text = str(value)
    if key in NUMERIC:
        return _number_terms(key, text)
    if key in _FLAGS:
        if text.lower() not in ("true", "false"):
            raise QueryError(f"{key}={text}: say true or false")
        return [Term(key, "=", text.lower() == "true")]
    _check_text(key, text)
    return [Term(key, "=", text)]


def _number_terms(key: str, text: str) -> list[Term]:
    low, dots, high = text.partition("..")
    if dots and (low.strip() or high.strip()):
        ends = [Term(key, ">=", _number(key, low))] if low.strip() else []
        ends += [Term(key, "<=", _number(key, high))] if high.strip() else []
        return ends
    match = _COMPARISON.fullmatch(text)
    assert match is not None
    return [Term(key, match[1] or "=", _number(key, match[2]))]


def _number(key: str, text: str) -> int | float:
    try:
        return NUMERIC[key](text)
    except ValueError:
        kind = "a whole number" if NUMERIC[key] is int else "a number"
        raise QueryError(
            f"{key}: {text!r} is not {kind}: write {key}=3, {key}=3..10 or '{key}<3'"
        ) from None


def _check_text(key: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise QueryError(f"{key}: {text!r} is not valid Unicode text") from None
    if key == "where":
        _check_expression(text)


def _check_expression(text: str) -> None:
    import duckdb

    try:
        duckdb.SQLExpression(text)
    except duckdb.Error as error:
        raise QueryError(
            f"where: {text!r} is not one SQL condition: {_reason(error, text)}"
        ) from None


def _reason(error: Exception, text: str) -> str:
    import duckdb

    sql = f"select {WHERE_MARK}{text}"
    try:
        duckdb.extract_statements(sql)
    except duckdb.Error as located:
        return one_line(located, sql)
    return one_line(error)


def _known() -> str:
    return f"filters: {', '.join(KEYS)}"
