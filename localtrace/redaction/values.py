"""Redaction of values at any depth: their texts, values under names of secrets, named fields."""

from __future__ import annotations

import base64
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import is_
from typing import Any

from localtrace.redaction.assignments import NAME
from localtrace.redaction.found import mark, replaced, with_pseudonyms
from localtrace.redaction.ids import IDS, REASON
from localtrace.redaction.names import is_secret, may_be_secret
from localtrace.redaction.pieces import texts_by_place
from localtrace.redaction.rules import Rules
from localtrace.redaction.unsearched import kind_of_data, kind_of_text
from localtrace.values.placeholder import Placeholder


@dataclass(frozen=True, slots=True)
class Held:
    """The place of a list in arguments or results; the list itself is kept in a column."""

    column: str


class Editor:
    """Redacts the values of one trajectory. An object that stands in two places is edited once.

    Args:
        rules: the rules to apply.
        counts: counter of replacements by rule, added to.
        unsearched: counter of values that could not be searched by kind, added to.
    """

    def __init__(
        self, rules: Rules, counts: Counter[str], unsearched: Counter[str] | None = None
    ) -> None:
        self.matched = False
        """True once a pattern has found something."""
        self.changed = False
        """True once anything was replaced."""
        self._rules = rules
        self._counts = counts
        self._unsearched = Counter() if unsearched is None else unsearched
        self._seen: dict[int, tuple[Any, Any]] = {}

    def text(self, text: str, before: str = "") -> str:
        """Return a text with every match replaced.

        Args:
            text: the text to search.
            before: the text or name that stands before it.
        """
        found = self._rules.search(text, before)
        if len(text) >= _DATA_AT_LEAST and (kind := kind_of_text(text)):
            self._unsearched[kind] += 1
        for one in found:
            self._found(one.name)
        return replaced(text, found) if found else text

    def value(self, value: Any, before: str = "") -> Any:
        """Return a value with every match in its texts replaced; the same object without one."""
        kind = type(value)
        if kind is str:
            return self.text(value, before)
        if kind not in (dict, list, tuple):
            return self._data(value)
        seen = self._seen.get(id(value))
        if seen is None:
            # Holding the value keeps its id from being given to another one.
            seen = (value, self._dict(value) if kind is dict else self._list(value))
            self._seen[id(value)] = seen
        return seen[1]

    def named(self, name: Any, value: Any) -> Any:
        """Return the redacted value of an argument, a field of a result or an item of a dict."""
        if type(value) is Held:
            return value
        if self.forbids(name, value):
            if isinstance(value, Placeholder) and value.reason == REASON:
                return value
            self._leave_out(name)
            return Placeholder(REASON, type(value).__name__)
        if type(name) is str and self._rules.has_defaults and may_be_secret(name):
            return self._secret(name, value)
        return self.value(value, name if type(name) is str else "")

    def _secret(self, name: str, value: Any) -> Any:
        """Return the redacted value under a name of a secret; lists and dicts keep their form."""
        if type(value) is str:
            edited = self.text(value, name)
            if not is_secret(name, value) or _is_mark(edited):
                return edited
            if edited is value:
                self._found(NAME)
            return mark(NAME)
        if type(value) is bytes:
            if not is_secret(name, _latin(value)):
                return self.value(value, name)
            self._found(NAME)
            return Placeholder(REASON, "bytes", len(value))
        if type(value) in (list, tuple):
            items = [self._secret(name, part) for part in value]
            return value if all(map(is_, items, value)) else type(value)(items)
        if type(value) is dict and not (value.keys() & _OF_SCHEMAS):
            fields = {
                key: self.named(key, part)
                if type(key) is str and may_be_secret(key)
                else self._secret(name, part)
                for key, part in value.items()
            }
            return value if all(map(is_, fields.values(), value.values())) else fields
        return self.value(value, name)

    def column(self, name: str, value: Any) -> Any:
        """Return the redacted value of a column, which holds no placeholders; None if left out."""
        if self.forbids(name, value):
            self._leave_out(name)
            return None
        if name in _IDENTITIES and type(value) is str:
            return self._identity(value)
        return self.text(value) if type(value) is str else value

    def _identity(self, value: str) -> str:
        """Return the name of a group or a sample, which stays apart from other ones."""
        found = self._rules.search(value)
        for one in found:
            self._found(one.name)
        return with_pseudonyms(value, found) if found else value

    def outcome(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Return the redacted columns of an outcome."""
        name, text = outcome["name"], mark(outcome["name"])
        if self.forbids(name, outcome) and outcome["text"] != text:
            self._leave_out(name)
            return {**outcome, "number": None, "text": text, "values": None}
        return {key: self.column("", value) for key, value in outcome.items()}

    def messages(self, name: str, messages: list[Any] | None) -> list[Any] | None:
        """Return redacted messages, as many as before, so that later lists still continue them."""
        if self.column(name, messages) is None or messages is None:
            return None
        # Nearly all messages of a turn stood in the list of the turn before.
        seen = self._seen
        edited = [
            known[1] if (known := seen.get(id(message))) else self.value(message)
            for message in messages
        ]
        return messages if all(map(is_, edited, messages)) else edited

    def forbids(self, name: Any, value: Any) -> bool:
        """Return whether the rules leave a field out."""
        return value is not None and type(name) is str and name in self._rules.fields

    def _leave_out(self, name: str) -> None:
        self.changed = True
        self._counts[name] += 1

    def _found(self, name: str) -> None:
        self.matched = self.changed = True
        self._counts[name] += 1

    def _finds(self, text: str, *, has_names: bool = True) -> bool:
        found = self._rules.search(text, has_names=has_names)
        if found:
            self._found(found[0].name)
        return bool(found)

    def _dict(self, value: dict[Any, Any]) -> Any:
        array = _array_text(value)
        if array is not None and self._finds(array):
            return Placeholder(REASON, "ndarray")
        edited: dict[Any, Any] = {}
        same = True
        cut = self._cut_keys(value)
        pair = _named_pair(value)
        for key, part in value.items():
            new_key = self.value(key)
            if key in cut:
                new_part = mark(NAME_OF_CUT)
            elif pair is not None and key == pair[1]:
                new_part = self.named(pair[0], part)
            else:
                new_part = self.named(key, part)
            same = same and new_key is key and new_part is part
            while new_key in edited:
                new_key = f"{new_key} ({len(edited)})"
            edited[new_key] = new_part
        return value if same else edited

    def _cut_keys(self, value: dict[Any, Any]) -> frozenset[Any]:
        """Return the names of adjacent texts that hold a key only together."""
        texts = [(name, part) for name, part in value.items() if type(part) is str and part]
        cut: set[Any] = set()
        for (name, text), (beside, other) in pairwise(texts):
            # A key is one word, so it can lie only across the last and the first word.
            if self._finds_across([_last_word(text), _first_word(other)]):
                cut |= {name, beside}
        return frozenset(cut)

    def _list(self, value: list[Any] | tuple[Any, ...]) -> Any:
        kinds = set(map(type, value))
        if kinds <= {int, float, bool, type(None)}:
            return value
        # The items may be pieces of one text: strings, or the deltas of a stream.
        if len(value) > 1 and kinds & {str, dict, list, tuple}:
            for texts in texts_by_place(value):
                if self._finds_across(texts):
                    return IDS
        parts = list(map(self.value, value))
        if kinds == {str}:
            for place, (name, text) in enumerate(pairwise(value), 1):
                if parts[place] is text and _goes_before(name, len(value)):
                    parts[place] = self.named(name, text)
        return value if all(map(is_, parts, value)) else type(value)(parts)

    def _finds_across(self, texts: list[str]) -> bool:
        """Return whether the texts together hold something that none of them holds alone."""
        if sum(map(len, texts)) < _KEY_AT_LEAST:
            return False
        ends = list(accumulate(map(len, texts)))
        found = self._rules.search("".join(texts), has_names=False)
        across = [
            one for one in found if bisect_right(ends, one.start) != bisect_left(ends, one.end)
        ]
        if found and not across:
            # A key may begin right after an escape, which may begin in the text before. Searched
            # alone, no text shows that key, although it lies within one of them.
            alone = sum(len(self._rules.search(text, has_names=False)) for text in texts)
            across = found[: max(0, len(found) - alone)]
        for one in across:
            self._found(one.name)
        return bool(across)

    def _data(self, value: Any) -> Any:
        text = None
        if type(value) is bytes:
            text = _latin(value)
        elif hasattr(value, "dtype") and hasattr(value, "tobytes"):
            text = _bytes_text(value.dtype.str, value.tobytes())
        if text is not None and self._finds(text):
            if type(value) is bytes:
                return Placeholder(REASON, "bytes", len(value))
            return Placeholder(REASON, "ndarray", value.nbytes)
        if (kind := kind_of_data(value)) is not None:
            self._unsearched[kind] += 1
        return value


_IDENTITIES = ("group_id", "sample_index")
"""Columns whose equal values belong together."""
NAME_OF_CUT = "part of a key"
_DATA_AT_LEAST = 256
_KEY_AT_LEAST = 18
_WORD_MAX_CHARS = 200
_OF_SCHEMAS = frozenset({"type", "anyOf", "allOf", "oneOf", "$ref", "enum", "description"})
"""Fields of a JSON schema; under the name of a password it describes one and holds none."""
_HEADER = re.compile(r"(?i:[\w-]*authorization|(?:set-)?cookie|[a-z]\w*(?:-\w+)+)")
_NAMES_OF_NAMES = ("name", "key", "header", "field", "env", "variable")


def _named_pair(value: dict[Any, Any]) -> tuple[str, str] | None:
    """Return the name that a dict gives to its `value`, as in lists of headers and variables."""
    if "value" not in value:
        return None
    names = (value.get(one) for one in _NAMES_OF_NAMES)
    return next(((name, "value") for name in names if type(name) is str), None)


def _goes_before(name: str, count: int) -> bool:
    """Return whether a text names the text after it: as an option, or in a pair as a header."""
    is_header = count == 2 and _HEADER.fullmatch(name) is not None
    return (is_header or name.startswith("-")) and may_be_secret(name)


def _first_word(text: str) -> str:
    return "" if text[0].isspace() else text[:_WORD_MAX_CHARS].split(maxsplit=1)[0]


def _last_word(text: str) -> str:
    return "" if text[-1].isspace() else text[-_WORD_MAX_CHARS:].rsplit(maxsplit=1)[-1]


def _is_mark(text: str) -> bool:
    return text.startswith("[redacted: ") and text.endswith("]") and text.count("[") == 1


def _latin(data: bytes) -> str:
    return data.decode("latin-1")


def _bytes_text(dtype: str, data: bytes) -> str | None:
    if dtype[1:2] == "U":
        return data.decode("utf-32-le", "replace").replace("\0", " ")
    return _latin(data) if dtype[1:2] == "S" or dtype[1:] in ("u1", "i1") else None


def _array_text(value: dict[Any, Any]) -> str | None:
    """Return the text of an array in the form that it has where numpy is not installed."""
    if value.get("$type") != "ndarray":
        return None
    try:
        return _bytes_text(value["dtype"], base64.b64decode(value["base64"]))
    except (KeyError, TypeError, ValueError):
        return None
