"""The grammar of filters: the values that each key takes, as text or as Python values.

Text after `key=` and a text given in Python are read alike: `3..10`, `<0.1`, `!=ok`, `1,2,5`. A
comma separates values only where no single value can contain one: between numbers, in `status`,
`fate`, `prompt_hash` and `tag`, and between whole numbers in `sample_index`. Other texts are taken
literally; a Python list may hold any values. This module knows nothing of views.
"""

from __future__ import annotations

import difflib
import math
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeAlias

from localtrace.errors import QueryError
from localtrace.read.sql_errors import WHERE_MARK, one_line

KEYS = (
    "run", "project", "experiment", "attempt", "step", "sample_index", "rollout_n", "group",
    "prompt_hash", "validate", "agent", "data_source", "reward", "fate", "status", "op", "contains",
    "truncated", "empty", "duplicate", "tool_errors", "repetition", "tag", "rating", "labelled",
    "labelled_by", "where",
)  # fmt: skip
"""Every filter, in the order in which help lists them."""
NUMERIC: dict[str, Callable[[Any], int | float]] = {
    "attempt": int,
    "step": int,
    "rollout_n": int,
    "reward": float,
    "tool_errors": int,
    "repetition": float,
    "rating": float,
}
"""Filters on numbers, and the function that reads each."""
REAL = frozenset(key for key, kind in NUMERIC.items() if kind is float)
"""Filters on numbers that may be NaN or infinite."""
NOT_FINITE = "not_finite"
"""The value of such a filter that means NaN and both infinities."""
_FLAGS = frozenset({"validate", "truncated", "empty", "duplicate", "labelled"})
_LITERAL = frozenset({"contains", "where"})
"""Filters whose text is always taken literally."""
_WITHOUT_COMMA = frozenset({"status", "fate", "prompt_hash", "tag"})
_WHOLE_NUMBERS = re.compile(r"\d+(,\d+)+")

_TERM = re.compile(r"\s*(\w+)\s*(<=|>=|!=|=|<|>)(.*)", re.DOTALL)
_COMPARISON = re.compile(r"\s*(<=|>=|!=|=|<|>)?\s*(.*?)\s*", re.DOTALL)
_SHOWN_MAX = 10
_NO_COMPARISON = (
    "{key}: a value that is not finite matches no comparison with {value}: write {key}={name} for "
    "NaN and both infinities"
)

Scalar: TypeAlias = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Term:
    """One condition: a filter's key, an operator (=, !=, <, <=, > or >=) and a value.

    Of several values any may be equal with =, and none with !=.
    """

    key: str
    operator: str
    value: Scalar | tuple[Scalar, ...]

    @property
    def values(self) -> tuple[Scalar, ...]:
        """The value as a tuple, or all of several values."""
        return self.value if isinstance(self.value, tuple) else (self.value,)

    def __str__(self) -> str:
        """Return the condition as on the command line; of many values only the first ones."""
        texts = [str(one).lower() if isinstance(one, bool) else str(one) for one in self.values]
        more = [f"… ({len(texts)} values)"] if len(texts) > _SHOWN_MAX else []
        return f"{self.key}{self.operator}{','.join([*texts[:_SHOWN_MAX], *more])}"


def is_filter(text: str) -> bool:
    """Return whether a text looks like a filter: a word, a comparison sign, a value."""
    return _TERM.fullmatch(text) is not None


def parse(text: str) -> list[Term]:
    """Read a filter such as `step=3..10` or `reward<0.1`.

    Raises:
        QueryError: it is not a filter, names no known key, or has a value of another type.
    """
    match = _TERM.fullmatch(text)
    if match is None:
        raise QueryError(
            f"{text!r} is not a filter: write key=value, such as step=3..10 or 'reward<0.1' "
            f"({_known()})"
        )
    key, operator, value = match.groups()
    if operator == "=":
        refuse_second_sign(key, value)
        return terms(key, value)
    if key in _LITERAL:
        raise QueryError(f"{text!r}: {key} can only be compared with =")
    if key in KEYS and key not in NUMERIC and operator != "!=":
        raise QueryError(f"{text!r}: {key} can only be compared with = and !=")
    return terms(key, operator + value)


def refuse_second_sign(key: str, value: str) -> None:
    """Refuse `reward=>1`, where `reward>=1` may be meant, or `reward>1`.

    Raises:
        QueryError: a sign of comparison follows the equals sign of a number.
    """
    match = _COMPARISON.fullmatch(value)
    if key in NUMERIC and match is not None and match[1] not in (None, "="):
        sign = match[1] if match[1].endswith("=") else f"{match[1]}="
        raise QueryError(f"{key}={value}: did you mean '{key}{sign}{match[2]}'?")


def terms(key: str, value: Any) -> list[Term]:
    """Read what a filter is given: text as above, a number, true or false, or a list of them.

    Raises:
        QueryError: there is no such filter, or it takes no such value.
    """
    if key not in KEYS:
        close = difflib.get_close_matches(key, KEYS, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise QueryError(f"unknown filter {key!r}: {hint}({_known()})")
    if hasattr(value, "tolist"):  # of NumPy, pandas and torch
        value = value.tolist()
    if isinstance(value, str):
        return _of_text(key, str.__str__(value))
    if isinstance(value, range) and value.step == 1 and value and key in NUMERIC:
        return [Term(key, ">=", value[0]), Term(key, "<=", value[-1])]
    if isinstance(value, list | tuple | range | set | frozenset) and key not in _LITERAL:
        return [Term(key, "=", tuple(_scalar(key, one) for one in value))]
    return [Term(key, "=", _scalar(key, value))]


def _of_text(key: str, text: str) -> list[Term]:
    if key in NUMERIC:
        return _of_numbers(key, text)
    operator = "="
    if key not in _LITERAL and text.lstrip().startswith("!="):
        operator, text = "!=", text.lstrip()[2:]
    if key in _WITHOUT_COMMA or (key == "sample_index" and _WHOLE_NUMBERS.fullmatch(text)):
        return [_listed(key, operator, text)]
    return [Term(key, operator, _scalar(key, text))]


def _of_numbers(key: str, text: str) -> list[Term]:
    low, dots, high = text.partition("..")
    if dots and (low.strip() or high.strip()):
        ends = [Term(key, ">=", _number(key, low))] if low.strip() else []
        ends += [Term(key, "<=", _number(key, high))] if high.strip() else []
        return ends
    match = _COMPARISON.fullmatch(text)
    assert match is not None
    operator = match[1] or "="
    if operator in ("=", "!="):
        return [_listed(key, operator, match[2])]
    return [Term(key, operator, _number(key, match[2]))]


def _listed(key: str, operator: str, text: str) -> Term:
    values = tuple(_scalar(key, one) for one in text.split(","))
    return Term(key, operator, values if len(values) > 1 else values[0])


def _scalar(key: str, value: Any) -> Scalar:
    if key in REAL:
        return _equal_to(key, value)
    if key in NUMERIC:
        return _number(key, value)
    if key in _FLAGS:
        text = str(value).strip().lower()
        if not isinstance(value, bool | str) or text not in ("true", "false"):
            raise QueryError(f"{key}={value}: say true or false")
        return text == "true"
    is_name = isinstance(value, Integral | uuid.UUID) and not isinstance(value, bool)
    if isinstance(value, str) or (is_name and key not in _LITERAL):
        return _text(key, str.__str__(value) if isinstance(value, str) else str(value))
    wanted = "text" if key in _LITERAL else "text, a whole number or a list of them"
    raise QueryError(f"{key} takes {wanted}, not {_kind(value)}: {value!r:.80}")


def _equal_to(key: str, value: Any) -> Scalar:
    if isinstance(value, str) and value.strip() == NOT_FINITE:
        return NOT_FINITE
    number = _number(key, value)
    if math.isinf(number):
        raise QueryError(_NO_COMPARISON.format(key=key, value=value, name=NOT_FINITE))
    return number


def _number(key: str, value: Any) -> int | float:
    is_whole = NUMERIC[key] is int
    number: int | float | None = None
    if isinstance(value, str) or _is_number(value, Integral if is_whole else Real):
        with suppress(ValueError, OverflowError):
            number = NUMERIC[key](value)
    if number is not None and math.isnan(number):
        raise QueryError(_NO_COMPARISON.format(key=key, value=value, name=NOT_FINITE))
    if number is not None:
        return number
    kind = "a whole number" if is_whole else "a number"
    raise QueryError(
        f"{key}: {value!r:.80} is not {kind}: write {key}=3, {key}=3..10, {key}=3,5 or '{key}<3', "
        "and in Python a number, a range or a list too"
    )


def _is_number(value: Any, kind: type[Any]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return f"a value of type {type(value).__name__}"


def _text(key: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise QueryError(f"{key}: {text!r} is not valid Unicode text") from None
    if key == "where":
        _check_expression(text)
    return text


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
