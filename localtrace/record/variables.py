"""Explanations of the LOCALTRACE_* variables of an environment, for `localtrace doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from msgspec import Struct
from msgspec.structs import FieldInfo, fields

from localtrace.errors import ConfigError
from localtrace.record.config import PREFIX, about, in_environment, parse, variable
from localtrace.record.settings import VARIABLES_ONLY, Settings

_KINDS: tuple[type[Struct], ...] = (Settings, *VARIABLES_ONLY)


@dataclass(frozen=True, slots=True)
class Variable:
    """A LOCALTRACE_* variable that is set."""

    text: str
    """Name, value and effect of the variable, or why it cannot be used."""
    is_usable: bool = True
    remedy: str | None = None
    """Advice, where the text gives none."""


def look_over(environ: Mapping[str, str]) -> Iterator[Variable]:
    """Yield every variable that is set, those that are no settings first."""
    known = [variable(field.name) for kind in _KINDS for field in fields(kind)]
    for name in sorted(environ):
        if name.upper().startswith(PREFIX) and name not in known:
            yield Variable(f"{name} is not a localtrace setting", False, _suggestion(name, known))
    for kind in _KINDS:
        for field, text in in_environment(kind, environ):
            yield _effect(field, text)


def _suggestion(name: str, known: list[str]) -> str:
    # Compared without their common prefix, which would make any two names look alike.
    near = get_close_matches(
        name.upper().removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in known], n=1
    )
    return f"did you mean {PREFIX}{near[0]}?" if near else "unset it: it has no effect"


def _effect(field: FieldInfo, text: str) -> Variable:
    name = variable(field.name)
    try:
        value = parse(field, text, name)
    except ConfigError as error:
        return Variable(str(error), False)
    state = f" ({'on' if value else 'off'})" if isinstance(value, bool) else ""
    return Variable(f"{name}={text}{state}: {about(field)['description']}")
