"""Files with a user's rules: TOML of this project's own form, or a `gitleaks.toml`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from localtrace.errors import ConfigError
from localtrace.redaction.matches import mark
from localtrace.redaction.rules import Expression, Pattern, Rules
from localtrace.store.files import open_given

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]


class _Pattern(msgspec.Struct, forbid_unknown_fields=True):
    name: _Name
    regex: Annotated[str, msgspec.Meta(min_length=1)]
    replace: str | None = None


class _Field(msgspec.Struct, forbid_unknown_fields=True):
    name: _Name


class _File(msgspec.Struct, forbid_unknown_fields=True):
    defaults: bool = True
    pattern: list[_Pattern] = []
    field: list[_Field] = []


def load_rules(path: Path | None) -> Rules:
    """Return the default rules together with those of a TOML file.

    The file has `[[pattern]]` tables with `name`, `regex` (Python's `re`) and optionally `replace`
    (plain text), `[[field]]` tables with `name`, and optionally `defaults = false`. Or it is a
    configuration of gitleaks, with `[[rules]]`.

    Raises:
        ConfigError: the file cannot be read, or a rule in it is wrong.
    """
    if path is None:
        return Rules()
    try:
        with open_given(path) as file:
            source = file.read()
    except OSError as error:
        raise ConfigError(
            f"cannot read the rules {path} ({error.strerror}): name a TOML file"
        ) from error
    try:
        tables = tomllib.loads(source.decode())
        if "rules" in tables:
            from localtrace.redaction.gitleaks import read_rules

            return Rules(read_rules(tables), source=source)
        rules = msgspec.convert(tables, _File)
        return Rules(
            [_compiled(pattern) for pattern in rules.pattern],
            [field.name for field in rules.field],
            has_defaults=rules.defaults,
            source=source,
        )
    except ImportError as error:
        raise ConfigError(
            f"{path} holds rules of gitleaks, which RE2 runs: pip install 'localtrace[gitleaks]'"
        ) from error
    except (ValueError, msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"the rules {path} are wrong: {error}. Write [[pattern]] tables with name = '…' and "
            "regex = '…' (replace = '…' if you like), [[field]] tables with name = '…', or name a "
            "gitleaks.toml that works"
        ) from error


def _compiled(rule: _Pattern) -> Pattern:
    try:
        regex = re.compile(rule.regex)
    except re.error as error:
        raise ValueError(f"pattern {rule.name!r} is not a regular expression, {error}") from error
    if regex.search(""):
        raise ValueError(f"the regex of pattern {rule.name!r} matches the empty text")
    if rule.replace is None:
        return Expression(rule.name, regex, mark(rule.name))
    pattern = Expression(rule.name, regex, rule.replace)
    if any(True for _ in pattern.find(rule.replace)):
        raise ValueError(f"the regex of pattern {rule.name!r} matches what it is replaced by")
    return pattern
