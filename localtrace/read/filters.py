"""Filters, the same for every way of reading: `step=3..10`, `reward<0.1`, `contains=text`.

A filter is a keyword argument in Python and the text `key=value` elsewhere; both become the same
parameterised condition. All filters must hold; on the command line a key may be repeated. Null, NaN
and the infinities match no comparison, not even `!=`; `reward=not_finite` finds the latter three.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from localtrace.read.sql_errors import WHERE_MARK
from localtrace.read.terms import (
    KEYS,
    NOT_FINITE,
    NUMERIC,
    REAL,
    Scalar,
    Term,
    is_filter,
    parse,
    terms,
)

__all__ = ["COLUMNS", "KEYS", "LATEST", "NUMERIC", "OTHER_VIEWS", "Filters", "RunName",
           "is_filter", "newest_run"]  # fmt: skip

LATEST = "latest"
"""The value of the filter `run` that means the run that started last."""


class RunName(str):
    """A parameter that names a run: its id, a beginning of its id, or its name.

    A `Store` replaces it by the id before it runs a query.
    """


COLUMNS = {key: key for key in KEYS} | {
    "run": "run_id", "group": "group_id", "labelled_by": "who",
}  # fmt: skip
"""The column that each filter is about."""
_DETECTORS = ("truncated", "empty", "duplicate", "tool_errors", "repetition")
_LABELS = ("tag", "rating", "labelled", "labelled_by")
OTHER_VIEWS = (
    {"op": "spans", "contains": "spans"}
    | dict.fromkeys(_DETECTORS, "detectors")
    | dict.fromkeys(_LABELS, "labels")
)
"""The view that has this column, for filters whose column `trajectories` lacks."""
_SPAN_KEYS = frozenset(
    {"run", "project", "experiment", "attempt", "step", "sample_index", "rollout_n"}
)
_DIRECT = {
    "trajectories": frozenset(KEYS) - OTHER_VIEWS.keys(),
    "spans": _SPAN_KEYS | {"op", "status", "contains", "where"},
    "tokens": _SPAN_KEYS | {"where"},
    "outcomes": frozenset({"run", "project", "experiment", "where"}),
    "runs": frozenset({"run", "project", "experiment", "attempt", "where"}),
    "turns": _SPAN_KEYS,
    "engine_calls": _SPAN_KEYS - {"sample_index", "rollout_n"},
    "messages": frozenset({"run", "project", "experiment", "step"}),
    "detectors": frozenset({"run", "project", "experiment", "step", "validate"}),
    "labels": frozenset({"run", "project", "experiment"}),
    "metrics": _SPAN_KEYS - {"sample_index", "rollout_n"},
}
"""By view, the filters that its own columns answer; the other filters ask `trajectories`."""
_LATE_KEYS = frozenset({"reward", "fate"})
"""Filters that need outcomes, which are joined with trajectories."""
_LATE_COLUMNS = frozenset({"reward", "advantage", "fate", "fate_reason", "trained_step"})
"""Columns of `trajectories` that are made from outcomes."""
_LINKS = dict.fromkeys(("spans", "tokens", "outcomes"), "trace_id") | {"runs": "run_id, attempt"}
_SHARED = {
    "spans": _SPAN_KEYS,
    "stored.spans": _SPAN_KEYS,
    "tokens": _SPAN_KEYS,
    "runs": frozenset({"run", "attempt"}),
    # Only keys that a whole group shares: a duplicate is found by looking at its whole group.
    "detectors": frozenset({"run", "project", "experiment", "step"}),
}
"""By view, the filters that a row meets exactly if its trajectory does.

The condition names them for both, so that DuckDB skips the files of other steps.
"""

_TEXTS = ("said(output_text, output_message)", "prompt_text")
_JSON_COLUMNS = ("messages", "inputs", "outputs")


@dataclass(frozen=True, slots=True, init=False)
class Filters:
    """A set of filters that must all hold.

    Numbers (`attempt`, `step`, `rollout_n`, `reward`, `tool_errors`, `repetition`, `rating`) take a
    number, a range ("3..10", both ends included, either may be left out) or a comparison ("<0.1");
    `reward`, `repetition` and `rating` also "not_finite": NaN and the infinities, which match no
    number, range or comparison. `validate`, `truncated`, `empty`, `duplicate` and `labelled` take
    true or false. `contains` searches, case-sensitively, the texts of a trajectory's calls:
    prompts, outputs, messages, inputs and results, the last three as JSON. `op` asks for
    trajectories with a call of that name, and with "!=" for those without such a call; `tag` and
    `labelled_by` do so for people's labels.
    Beside `labelled_by`, `tag`, `rating` and `labelled` are about that person's labels. `where` is
    a free SQL condition on the columns of the view that is read. Every other key must be equal. A
    value of None is no filter.

    A list, tuple, set, range or array means any of its values, for every key but `contains` and
    `where`. So does text with commas where it cannot be one value: "1,2" for numbers and for
    `sample_index`, "ok,error" for `status`, and for `fate`, `tag` and `prompt_hash`. Text after
    "!=" must not be equal, nor any of several: "!=ok".

    `run` takes a run's id, its name, or a beginning of its id that no other id shares.
    `run="latest"` is the run that started last, or was resumed last, of those in the project and
    the experiment that are asked for.

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
        self._set(term for key, value in given for term in terms(key, value))

    def _set(self, found: Iterable[Term]) -> None:
        object.__setattr__(self, "terms", tuple(found))

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Filters:
        """Read filters from text such as `step=3..10` or `reward<0.1`.

        Raises:
            QueryError: a text is not a filter, names no known key, or has a value of another type.
        """
        filters = cls()
        filters._set(term for text in texts for term in parse(text))
        return filters

    def __str__(self) -> str:
        """Return the filters as they are written on the command line."""
        return " ".join(map(str, self.terms))

    def __and__(self, other: Filters) -> Filters:
        """Return the filters of both, which must all hold."""
        both = Filters()
        both._set([*self.terms, *other.terms])
        return both

    @property
    def has_sql(self) -> bool:
        """Whether any of them is SQL that a user wrote."""
        return any(term.key == "where" for term in self.terms)

    def by_key(self) -> dict[str, Filters]:
        """Return the filters of each key, by key."""
        alone = {term.key: Filters() for term in self.terms}
        for key, filters in alone.items():
            filters._set(term for term in self.terms if term.key == key)
        return alone

    def relation(self, *columns: str, with_superseded: bool = False) -> str:
        """Return the fastest relation that holds the trajectories; `where_clause` filters it.

        The views of trajectories join outcomes and processes. Where neither the filters nor the
        columns need them, the relation leaves that out.

        Args:
            columns: columns that are read, besides those that the table `trajectories` has; none
                of a process.
            with_superseded: keep superseded trajectories, and a column `superseded`.
        """
        keys = {term.key for term in self.terms}
        is_late = not (keys.isdisjoint(_LATE_KEYS) and _LATE_COLUMNS.isdisjoint(columns))
        if self.has_sql:  # which may name any column
            return "all_trajectories" if with_superseded else "trajectories"
        every = "stored.judged" if is_late else "stored.flagged"
        return every if with_superseded else f"(from {every} where not superseded)"

    def where_clause(self, view: str = "trajectories") -> tuple[str, dict[str, Any]]:
        """Return the condition for a query on a view, and its parameters by name.

        Args:
            view: trajectories, spans, tokens, outcomes or runs. On spans, tokens and outcomes the
                condition also leaves out rows of superseded trajectories.
        """
        named = self._named()
        params: dict[str, Any] = {}
        for one in named:
            params |= one.params()
        return _clause(view, named), params

    def direct_clause(self, view: str) -> str:
        """Return the filters that a view's own columns answer; its parameters are the same."""
        direct = [one.condition() for one in self._named() if one.term.key in _DIRECT[view]]
        return " and ".join(direct) or "true"

    def _named(self) -> list[_Named]:
        named = [_Named(f"filter_{number}", term) for number, term in enumerate(self.terms)]
        # From all terms, because a condition on another view repeats only some of them.
        among = [one.condition() for one in named if one.term.key in ("project", "experiment")]
        newest = newest_run(" and ".join(among) or "true")
        return [replace(one, newest_run=newest) for one in named]


def newest_run(condition: str) -> str:
    """Return SQL for the id of the run that started last among runs that meet a condition."""
    return f"(select run_id from runs where {condition} order by start_ns desc, run_id limit 1)"


@dataclass(frozen=True, slots=True)
class _Named:
    """A term, and the name of its parameter or the beginning of the names of several."""

    name: str
    term: Term
    newest_run: str = "null"

    def condition(self, operator: str | None = None, column: str | None = None) -> str:
        """Return the term as SQL, with its own operator and column or with others."""
        key, operator = self.term.key, operator or self.term.operator
        if key == "where":
            return f"({WHERE_MARK}{self.term.value}\n)"  # the line ends a trailing comment
        if key == "contains":
            texts = [f"contains({text}, ${self.name})" for text in _TEXTS]
            texts += [f"contains({column}, ${self.name}_json)" for column in _JSON_COLUMNS]
            return f"({' or '.join(texts)})"
        values = [self._value(name, value) for name, value in self._values().items()]
        column = column or COLUMNS[key]
        sign = {"=": "in", "!=": "not in"}.get(operator, operator)
        compared = f"{column} {sign} ({', '.join(values) or 'null'})"
        if not isinstance(self.term.value, tuple):
            compared = f"{column} {operator} {values[0]}" if values else "false"
        if key not in REAL:
            return compared
        if NOT_FINITE not in self.term.values:
            return f"(isfinite({column}) and {compared})"
        if operator == "=":
            return f"(not isfinite({column}) or {compared})"
        return f"(isfinite({column}) and {compared if values else 'true'})"

    def params(self) -> dict[str, Any]:
        """Return the values of the parameters by name."""
        if self.term.key == "where":
            return {}
        if self.term.key == "contains":
            quoted = msgspec.json.encode(self.term.value).decode()
            return {self.name: self.term.value, f"{self.name}_json": quoted[1:-1]}
        values = self._values().items()
        if self.term.key == "run":
            return {name: RunName(value) for name, value in values if value != LATEST}
        return dict(values)

    def _values(self) -> dict[str, Scalar]:
        if not isinstance(self.term.value, tuple):
            named = {self.name: self.term.value}
        else:
            named = {f"{self.name}_{place}": value for place, value in enumerate(self.term.value)}
        if self.term.key not in REAL:
            return named
        return {name: value for name, value in named.items() if value != NOT_FINITE}

    def _value(self, name: str, value: Scalar) -> str:
        return self.newest_run if self._is_latest(value) else f"${name}"

    def _is_latest(self, value: Scalar) -> bool:
        return self.term.key == "run" and value == LATEST


def _clause(view: str, named: list[_Named]) -> str:
    conditions = [one.condition() for one in named if one.term.key in _DIRECT[view]]
    beyond = [one for one in named if one.term.key not in _DIRECT[view]]
    if view == "trajectories":
        conditions += [_elsewhere(other, asked, named) for other, asked in _parted(beyond)]
        conditions += _labelled([one for one in beyond if OTHER_VIEWS[one.term.key] == "labels"])
    elif beyond:
        inner_clause = _clause("trajectories", [*_shared(view, named), *beyond])
        conditions.append(_linked(_LINKS[view], "trajectories", inner_clause))
    elif view != "runs":
        conditions.append("trace_id not in (select trace_id from superseded)")
    return " and ".join(conditions) or "true"


def _parted(beyond: list[_Named]) -> list[tuple[str, list[_Named]]]:
    """Return the other views to ask, with the terms that one row must meet.

    Each term on calls may be met by another call; the terms on detectors are met by one row.
    """
    # The view `spans` lacks the texts of single generations where a call made several.
    views = {"contains": "stored.spans"}
    calls = [
        (views.get(one.term.key, "spans"), [one])
        for one in beyond
        if OTHER_VIEWS[one.term.key] == "spans"
    ]
    detectors = [one for one in beyond if OTHER_VIEWS[one.term.key] == "detectors"]
    return [*calls, ("detectors", detectors)] if detectors else calls


def _elsewhere(view: str, asked: list[_Named], named: list[_Named]) -> str:
    shared = [one.condition() for one in _shared(view, named)]
    if view == "spans" and asked[0].term.operator == "!=":  # no call is one
        return f"not {_linked('trace_id', view, ' and '.join([*shared, asked[0].condition('=')]))}"
    return _linked("trace_id", view, " and ".join([*shared, *(one.condition() for one in asked)]))


def _labelled(asked: list[_Named]) -> list[str]:
    """Return the conditions on labels; `labelled_by` tells whose labels the others are about."""
    by = [one for one in asked if one.term.key == "labelled_by"]
    whose = [one.condition() for one in by if one.term.operator == "="]

    def has(*conditions: str) -> str:
        return _linked("trace_id", "labels", " and ".join([*conditions, *whose]) or "true")

    found = [has(one.condition()) for one in asked if _is_tag(one, "=")]
    found += [f"not {has(one.condition('='))}" for one in asked if _is_tag(one, "!=")]
    # One rating must meet all, so that a range is one.
    if ratings := [one.condition() for one in asked if one.term.key == "rating"]:
        found.append(has(*ratings))
    found += [one.condition(column=has()) for one in asked if one.term.key == "labelled"]
    if whose and not found:
        found.append(has())
    nobody = [one.condition("=") for one in by if one.term.operator == "!="]
    return found + [f"not {_linked('trace_id', 'labels', one)}" for one in nobody]


def _is_tag(one: _Named, operator: str) -> bool:
    return one.term.key == "tag" and one.term.operator == operator


def _shared(view: str, named: list[_Named]) -> list[_Named]:
    return [one for one in named if one.term.key in _SHARED.get(view, ())]


def _linked(link: str, view: str, condition: str) -> str:
    # Where the outer view has a lateral join, DuckDB filters before the join only with `exists`;
    # `in` is several times slower.
    names = link.split(", ")
    columns = ", ".join(f"{name} as of_{name}" for name in names)
    same = " and ".join(f"of_{name} = {name}" for name in names)
    return f"exists (select 1 from (select {columns} from {view} where {condition}) where {same})"
