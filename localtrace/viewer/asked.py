"""A request as pages see it: the store, the filters of its address, and addresses made from them.

The filters stand in `q`, written as on the command line: `step=3..10 'reward<0.1'`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

from localtrace.errors import QueryError
from localtrace.read.filter_registry import FILTERS
from localtrace.read.filters import Filters, key_of
from localtrace.read.run_names import run_id_of, run_names

if TYPE_CHECKING:
    import pyarrow as pa

    from localtrace.read.store import Store

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """One request to a page."""

    store: Store
    path_values: Mapping[str, str]
    """The parts of the address that the page's path names."""
    values: Mapping[str, str]
    """Values after the question mark."""
    kept: Callable[[object, Callable[[], Any]], Any]
    """See `Moment.kept`."""

    @property
    def q(self) -> str:
        """The filters as they were written."""
        return self.values.get("q", "").strip()

    @cached_property
    def filters(self) -> Filters:
        """The filters, separated by spaces, with quotes as in a shell.

        Raises:
            QueryError: they cannot be read.
        """
        return Filters.parse(words_of(self.q))

    @property
    def condition(self) -> str:
        """The condition of the filters, for the view `trajectories`."""
        return self._where[0]

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the condition."""
        return self._where[1]

    @cached_property
    def _where(self) -> tuple[str, dict[str, Any]]:
        return self.filters.where_clause()

    @property
    def run_names(self) -> dict[str, str]:
        """Names that tell runs apart, by run id; none where there is one run."""
        made: dict[str, str] = self.kept("run names", lambda: run_names(self.store))
        return made

    @property
    def several_runs(self) -> dict[str, str]:
        """Names of runs where rollouts of several may match; none where one run is asked for."""
        runs = [term for term in self.filters.terms if term.key == "run" and term.operator == "="]
        return {} if any(len(term.values) == 1 for term in runs) else self.run_names

    def rows(self, sql: str, params: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Run a SELECT, whose text holds nothing of a user but the filters; return its rows."""
        return self.store.own_sql(sql, params, self.filters).to_dicts()

    def table(self, sql: str, params: Mapping[str, Any] | None = None) -> pa.Table:
        """Run a SELECT as `rows` does; return its rows as a table."""
        return self.store.own_sql(sql, params, self.filters).to_arrow()

    def required(self, name: str) -> str:
        """Return a value that the address must hold; for `run`, the id of the run that it names.

        Raises:
            QueryError: it does not.
        """
        value = self.values.get(name)
        if not value:
            raise QueryError(f"the address lacks {name}=…: follow a link of another page")
        return self.run_id(value) if name == "run" else value

    def run_id(self, text: str) -> str:
        """Return the id of the run that a text names, as the filter `run` does."""
        return run_id_of(self.store, text)

    def number(self, name: str, default: int, most: int = 10**9) -> int:
        """Return a whole number of the address, at least 0, or the default where there is none."""
        text = self.values.get(name, "")
        return min(int(text), most) if text.isascii() and text.isdigit() else default

    def one_of(self, name: str, known: Mapping[str, T], default: str) -> str:
        """Return a value of the address that must be one of those known.

        Raises:
            QueryError: it is another one.
        """
        value = self.values.get(name) or default
        if value not in known:
            raise QueryError(f"{name}={value}: it is one of {', '.join(known)}")
        return value


def words_of(text: str) -> list[str]:
    """Return the single filters of a text, which are separated as in a shell.

    Raises:
        QueryError: a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise QueryError(f"{text!r}: {str(error).lower()}; put quotes around a value") from None


def with_terms(text: str, **terms: object) -> str:
    """Return filters with others in the place of those of the same keys; None takes them out.

    A value may begin with a comparison, such as `<0.1`.
    """
    words = [word for word in words_of(text) if key_of(word) not in terms]
    words += [_word(key, value) for key, value in terms.items() if value is not None]
    return " ".join(map(_quoted, words))


def with_word(text: str, word: str) -> str:
    """Return filters with one more, which must hold too."""
    return " ".join(map(_quoted, [*words_of(text), word]))


def without_word(text: str, index: int) -> str:
    """Return filters without the one at this place."""
    return " ".join(_quoted(word) for at, word in enumerate(words_of(text)) if at != index)


def url(path: str, /, **values: object) -> str:
    """Return an address on this server; values that are None are left out.

    Args:
        path: with its parts encoded, see `part`.
        values: what stands after the question mark.
    """
    given = {name: _text(value) for name, value in values.items() if value is not None}
    query = urlencode({name: text for name, text in given.items() if text != ""})
    return f"{path}?{query}" if query else path


def part(text: object) -> str:
    """Return a text encoded as one part of an address's path."""
    return quote(_text(text), safe="")


def _word(key: str, value: object) -> str:
    text = _text(value)
    is_compared = FILTERS[key].is_number and text[:1] in ("<", ">")
    return f"{key}{text}" if is_compared else f"{key}={text}"


def _quoted(word: str) -> str:
    # `reward<0.1` needs no quotes here, and is easier to read without.
    return word if re.fullmatch(r"[\w=<>!.,:/@%+\-]+", word) else shlex.quote(word)


def _text(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text.encode("utf-8", "replace").decode()
