"""Files with a user's rules: TOML of this project's own form, or a `gitleaks.toml`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from localtrace.errors import ConfigError
from localtrace.redaction.found import mark
from localtrace.redaction.rules import Expression, Rules
from localtrace.store.files import open_given


class _Pattern(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
    regex: Annotated[str, msgspec.Meta(min_length=1)]
    replace: str | None = None


class _Field(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    defaults: bool = True
    pattern: list[dict[str, Any]] = []
    field: list[dict[str, Any]] = []


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
            tables = tomllib.load(file)
        if "rules" in tables:
            from localtrace.redaction.gitleaks import read_rules

            return Rules(read_rules(path, tables))
        given = msgspec.convert(tables, _File)
    except OSError as error:
        raise ConfigError(
            f"cannot read the rules {path} ({error.strerror}): name a TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise _wrong(path, "the file", error) from error
    patterns = tuple(
        _compiled(path, f"pattern {number}", _rule(path, f"pattern {number}", table, _Pattern))
        for number, table in enumerate(given.pattern, 1)
    )
    fields = [
        _rule(path, f"field {number}", table, _Field).name
        for number, table in enumerate(given.field, 1)
    ]
    return Rules(patterns, fields, has_defaults=given.defaults)


_Rule = TypeVar("_Rule", _Pattern, _Field)


def _rule(path: Path, where: str, table: dict[str, Any], kind: type[_Rule]) -> _Rule:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise _wrong(path, where, error) from error


def _wrong(path: Path, where: str, error: object) -> ConfigError:
    return ConfigError(
        f"the rules {path} are wrong, {where}: {error}. Write [[pattern]] tables with name = '…' "
        "and regex = '…' (replace = '…' if you like), [[field]] tables with name = '…'"
    )


def _compiled(path: Path, where: str, rule: _Pattern) -> Expression:
    where = f"{where} ({rule.name!r})"
    try:
        regex = re.compile(rule.regex)
    except (re.error, OverflowError, RecursionError) as error:
        raise _wrong(path, where, f"not a regular expression, {error}") from error
    if regex.search(""):
        raise _wrong(path, where, "its regex matches the empty text")
    if rule.replace is None:
        return Expression(rule.name, regex, mark(rule.name))
    pattern = Expression(rule.name, regex, rule.replace)
    if any(True for _ in pattern.find(rule.replace)):
        raise _wrong(path, where, "its regex matches what it is replaced by")
    return pattern
