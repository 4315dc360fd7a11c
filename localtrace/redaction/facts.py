"""Commands, configurations and other facts of a run, without secrets before they are written.

The default rules are applied strictly here: a value removed for nothing costs little, and what was
written cannot be taken back.
"""

from __future__ import annotations

from typing import Any

from localtrace.redaction.matches import with_pseudonyms
from localtrace.redaction.redactor import Redactor, Report
from localtrace.redaction.rules import Rules


def without_secrets(value: Any) -> Any:
    """Return a value with its secrets replaced, at any depth; numbers and truth values stay."""
    return Redactor(Rules(), Report(), is_strict=True).value(value)


def name_without_secrets(name: str) -> str:
    """Return the name of a run, project or experiment with a pseudonym in place of each secret.

    Equal secrets get equal pseudonyms, so records are still found and joined by the name.
    """
    return with_pseudonyms(name, Rules().search(name))


def command_line(arguments: list[str]) -> str:
    """Return a command with its secrets replaced."""
    # Searched again as a whole: the word that gives a secret away may be the argument before it.
    return str(without_secrets(" ".join(without_secrets(arguments))))
