"""Redaction of values: texts and named fields at any depth, and lists that may be token ids."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from localtrace.placeholder import Placeholder
from localtrace.schema import OUTPUT_NAMES, PROMPT_NAMES
from localtrace.uploader.redaction.rules import Pattern, Rules, mark

REASON = "redacted"
IDS = Placeholder(REASON, "list")
_ID_NAMES = frozenset({*PROMPT_NAMES, *OUTPUT_NAMES})
_IDS_AT_LEAST = 9
"""So many whole numbers are taken for ids, whatever their name."""


@dataclass(frozen=True, slots=True)
class Held:
    """Stands in arguments and results where a list was that is kept beside them."""

    column: str


class Editor:
    """Edits the values of one trajectory; what is the same object in two places is edited once.

    Args:
        counts: told how often each rule replaced something.
    """

    def __init__(self, rules: Rules, counts: Counter[str]) -> None:
        self.matched = False
        """Whether a pattern found something."""
        self.changed = False
        """Whether anything was replaced."""
        self._rules = rules
        self._counts = counts
        self._seen: dict[int, tuple[Any, Any]] = {}

    def text(self, text: str, before: str = "") -> str:
        """A text that comes after another one, with every match replaced."""
        edited = text
        for pattern in self._rules.suspects(text):
            parts = self._rules.parts_between_marks(edited)
            for place in range(0, len(parts), 2):
                parts[place], count = pattern.replaced(parts[place], before)
                if count:
                    self._found(pattern, count)
            edited = "".join(parts)
        return text if edited == text else edited

    def value(self, value: Any, before: str = "") -> Any:
        """A value with every match in its texts replaced; the same object where there is none."""
        kind = type(value)
        if kind is str:
            return self.text(value, before)
        if kind not in (dict, list, tuple):
            return self._data(value)
        seen = self._seen.get(id(value))
        if seen is None:
            # The value is kept, so that no other one gets its id.
            seen = (value, self._dict(value) if kind is dict else self._list(value))
            self._seen[id(value)] = seen
        return seen[1]

    def named(self, name: Any, value: Any) -> Any:
        """A value under a name: an argument, a field of a result, an item of a dict."""
        if type(value) is Held or not self.forbids(name, value):
            return self.value(value, name if type(name) is str else "")
        if isinstance(value, Placeholder) and value.reason == REASON:
            return value
        self._leave_out(name)
        return Placeholder(REASON, type(value).__name__)

    def column(self, name: str, value: Any) -> Any:
        """A value under a name where no placeholder can stand; None where it is left out."""
        if self.forbids(name, value):
            self._leave_out(name)
            return None
        return self.text(value) if type(value) is str else value

    def outcome(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """A value that arrived later, by its columns."""
        name, text = outcome["name"], mark(outcome["name"])
        if self.forbids(name, outcome) and outcome["text"] != text:
            self._leave_out(name)
            return {**outcome, "number": None, "text": text, "values": None}
        return {key: self.column("", value) for key, value in outcome.items()}

    def messages(self, name: str, messages: list[Any] | None) -> list[Any] | None:
        """A list of messages, of the same length, so that others can continue it."""
        if self.column(name, messages) is None or messages is None:
            return None
        edited = [self.value(message) for message in messages]
        return messages if all(map(_is, edited, messages)) else edited

    def forbids(self, name: Any, value: Any) -> bool:
        """Whether the rules leave a field out."""
        return value is not None and type(name) is str and name in self._rules.fields

    def _leave_out(self, name: str) -> None:
        self.changed = True
        self._counts[name] += 1

    def _found(self, pattern: Pattern, count: int = 1) -> None:
        self.matched = self.changed = True
        self._counts[pattern.name] += count

    def _finds(self, text: str) -> bool:
        pattern = self._rules.first_match(text)
        if pattern is not None:
            self._found(pattern)
        return pattern is not None

    def _dict(self, value: dict[Any, Any]) -> Any:
        array = _array_text(value)
        if array is not None and self._finds(array):
            return Placeholder(REASON, "ndarray")
        edited: dict[Any, Any] = {}
        same = True
        for key, part in value.items():
            new_key, new_part = self.value(key), self.named(key, part)
            same = same and new_key is key and new_part is part
            while new_key in edited:
                new_key = f"{new_key} ({len(edited)})"
            edited[new_key] = new_part
        return value if same else edited

    def _list(self, value: list[Any] | tuple[Any, ...]) -> Any:
        kinds = set(map(type, value))
        if kinds <= {int, float, bool, type(None)}:
            return value
        parts = type(value)(map(self.value, value))
        # A text that arrived in pieces.
        if kinds == {str} and len(parts) > 1 and self._finds("".join(parts)):
            return IDS
        return value if all(map(_is, parts, value)) else parts

    def _data(self, value: Any) -> Any:
        if type(value) is bytes:
            return Placeholder(REASON, "bytes", len(value)) if self._finds(_latin(value)) else value
        if hasattr(value, "dtype") and hasattr(value, "tobytes"):
            text = _bytes_text(value.dtype.str, value.tobytes())
            if text is not None and self._finds(text):
                return Placeholder(REASON, "ndarray", value.nbytes)
        return value


def _is(left: Any, right: Any) -> bool:
    return left is right


def _latin(data: bytes) -> str:
    return data.decode("latin-1")


def _bytes_text(dtype: str, data: bytes) -> str | None:
    if dtype[1:2] == "U":
        return data.decode("utf-32-le", "replace").replace("\0", " ")
    return _latin(data) if dtype[1:2] == "S" or dtype[1:] in ("u1", "i1") else None


def _array_text(value: dict[Any, Any]) -> str | None:
    """The text of an array as it stands where numpy is not installed."""
    if value.get("$type") != "ndarray":
        return None
    try:
        return _bytes_text(value["dtype"], base64.b64decode(value["base64"]))
    except (KeyError, TypeError, ValueError):
        return None


def id_lists(value: Any) -> Iterator[list[int]]:
    """Lists of whole numbers that an argument or a result names as ids, the prompt first."""
    if isinstance(value, dict):
        for name in (*PROMPT_NAMES, *OUTPUT_NAMES):
            if _are_ints(value.get(name)):
                yield value[name]
    elif _are_ints(value):
        yield value


def _are_ints(value: Any) -> bool:
    return type(value) is list and set(map(type, value)) == {int}


def without_ids(value: Any) -> Any:
    """A value without what may be token ids; the same object where there is none.

    Log-probabilities and masks stay.
    """
    kind = type(value)
    if kind is dict:
        if value.get("$type") == "ndarray":  # as it stands where numpy is not installed
            return IDS
        edited = {
            key: IDS if key in _ID_NAMES and _were_ids(part) else without_ids(part)
            for key, part in value.items()
        }
        return value if all(map(_is, edited.values(), value.values())) else edited
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return IDS if value.dtype.kind in "iuf" and holds_ids(value.ravel().tolist()) else value
    if kind not in (list, tuple):
        return value
    if holds_ids(value):
        return IDS
    parts = [without_ids(part) for part in value]
    return value if all(map(_is, parts, value)) else kind(parts)


def _were_ids(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_were_ids, value))
    if isinstance(value, Placeholder):  # a prompt that could not be rebuilt
        return value.reason == "damaged"
    return type(value) is int or (hasattr(value, "dtype") and value.size > 0)


def holds_ids(values: Sequence[Any]) -> bool:
    """Whether a list may be token ids: whole numbers, in lists of them, or one in each row."""
    if len(values) >= _IDS_AT_LEAST and all(map(_is_token, values)):
        return True
    if values and all(type(row) in (list, tuple) for row in values):
        values = list(chain.from_iterable(values))
    return _are_whole(values)


def _are_whole(values: Sequence[Any]) -> bool:
    # Numbers below zero pad; a list of ones and zeros is a mask.
    return (
        len(values) >= _IDS_AT_LEAST
        and set(map(type, values)) <= {int, float}
        and all(type(one) is int or one.is_integer() for one in values)
        and max(values) > 1
    )


def _is_token(row: Any) -> bool:
    """One token as engines list them beside its log-probability."""
    if isinstance(row, dict):
        return "token" in row or "token_id" in row or any(type(key) is int for key in row)
    return type(row) in (list, tuple) and {int, float} <= set(map(type, row))
