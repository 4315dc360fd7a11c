"""Commands, configurations and other facts of a run, without secrets before they are written.

The default rules are applied strictly here: a value removed for nothing costs little, and what was
written cannot be taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from localtrace.redaction.defaults import find_defaults
from localtrace.redaction.found import apart, replaced, with_pseudonyms
from localtrace.redaction.names import is_secret, may_be_secret

LEFT_OUT = "[secret left out]"


def without_secrets(value: Any) -> Any:
    """Return a value with its secrets replaced, at any depth; numbers and truth values stay."""
    if isinstance(value, Mapping):
        return {
            text_without_secrets(name) if isinstance(name, str) else name: _named(str(name), item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [without_secrets(item) for item in value]
        if value and all(isinstance(item, str) for item in value):
            return _options(value, items)
        return items
    return text_without_secrets(value) if isinstance(value, str) else value


def text_without_secrets(text: str) -> str:
    """Return a text with its secrets replaced."""
    found = apart(find_defaults(text, is_strict=True))
    return replaced(text, [one._replace(replacement=LEFT_OUT) for one in found])


def name_without_secrets(name: str) -> str:
    """Return the name of a run, project or experiment with a pseudonym in place of each secret.

    Equal secrets get equal pseudonyms, so records are still found and joined by the name.
    """
    return with_pseudonyms(name, apart(find_defaults(name)))


def command_line(arguments: list[str]) -> str:
    """Return a command with its secrets replaced."""
    # Searched again as a whole: the word that gives a secret away may be the argument before it.
    return text_without_secrets(" ".join(without_secrets(arguments)))


def _named(name: str, value: Any) -> Any:
    if may_be_secret(name) and _holds_text(value):
        if not isinstance(value, str | bytes):
            if is_secret(name, "s3cret", is_strict=True):
                return LEFT_OUT
            items = value.items() if isinstance(value, Mapping) else ((name, i) for i in value)
            safe = [(key, _named(name, item)) for key, item in items]
            return dict(safe) if isinstance(value, Mapping) else [item for _, item in safe]
        text = value if isinstance(value, str) else value.decode("latin-1")
        if is_secret(name, text, is_strict=True):
            return LEFT_OUT
    return without_secrets(value)


def _holds_text(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple | Mapping) and bool(value)


def _options(values: Iterable[str], items: list[Any]) -> list[Any]:
    """Replace items that follow the name of a secret, as in the arguments of a command."""
    for place, (name, value) in enumerate(pairwise(values), 1):
        is_option = name.startswith("-") and "=" not in name and not value.startswith("--")
        if is_option and is_secret(name, value, is_strict=True):
            items[place] = LEFT_OUT
    return items
