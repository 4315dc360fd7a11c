"""Rules of redaction: the shapes of common keys, and what a user's file adds.

Shapes follow what the issuers document. Each begins with something literal, so that searching a
long text for it is quick.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from localtrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that must not leave."""

    name: str
    regex: re.Pattern[str]
    replacement: str


def _default(name: str, regex: str, around: str = "{}") -> Pattern:
    return Pattern(name, re.compile(regex), around.format(f"[redacted: {name}]"))


DEFAULTS = (
    _default("openai or anthropic key", r"\bsk-[A-Za-z0-9_-]{20,}"),
    _default("hugging face token", r"\bhf_[A-Za-z0-9]{30,}"),
    _default("github token", r"\bgh[opsur]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{30,}"),
    _default("gitlab token", r"\bglpat-[A-Za-z0-9_-]{20,}"),
    _default("aws access key", r"\bA(?:KIA|SIA)[A-Z0-9]{16}\b"),
    _default("google api key", r"\bAIza[A-Za-z0-9_-]{35}"),
    _default("slack token", r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),
    _default(
        "w&b key", r"\bwandb_v1_[A-Za-z0-9_]{20,}|(?i:wandb)[\w .:='\"-]{0,24}?\b[0-9a-f]{40}\b"
    ),
    _default("json web token", r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"),
    _default("bearer header", r"\b[Bb]earer [A-Za-z0-9._~+/-]{16,}=*", "Bearer {}"),
    _default(
        "private key",
        r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----[^-]{0,20000}"
        r"(?:-----END [A-Z ]{0,20}PRIVATE KEY-----)?",
    ),
    _default("password in a url", r"://[^\s/:@\"'\[]{1,200}:[^\s/@\"']{1,200}@", "://{}@"),
)
"""What never leaves unless a file says `defaults = false`."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Patterns in texts, and names of fields whose values are left out."""

    patterns: tuple[Pattern, ...]
    fields: frozenset[str]

    def parts(self) -> list[Any]:
        """Everything that decides what is redacted."""
        patterns = [[p.name, p.regex.pattern, p.replacement] for p in self.patterns]
        return [patterns, sorted(self.fields)]


class _Pattern(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    regex: str
    replace: str | None = None


class _Field(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    defaults: bool = True
    pattern: list[_Pattern] = []
    field: list[_Field] = []


def load_rules(path: Path | None) -> Rules:
    """The default rules, and those of a TOML file.

    The file has `[[pattern]]` tables with `name`, `regex` (Python's `re`) and optionally `replace`
    (plain text), `[[field]]` tables with `name`, and optionally `defaults = false`.

    Raises:
        ConfigError: the file cannot be read, or a rule in it is wrong.
    """
    if path is None:
        return Rules(DEFAULTS, frozenset())
    try:
        given = msgspec.convert(tomllib.loads(path.read_text("utf-8")), _File)
    except OSError as error:
        raise ConfigError(f"cannot read the rules {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"the rules {path} are wrong ({error}): write [[pattern]] tables with name and regex, "
            "and [[field]] tables with name"
        ) from error
    patterns = tuple(_compiled(path, rule) for rule in given.pattern)
    defaults = DEFAULTS if given.defaults else ()
    return Rules((*patterns, *defaults), frozenset(rule.name for rule in given.field))


def _compiled(path: Path, rule: _Pattern) -> Pattern:
    try:
        regex = re.compile(rule.regex)
    except re.error as error:
        raise ConfigError(
            f"the rules {path} are wrong: the regex of {rule.name!r} cannot be read ({error})"
        ) from error
    if regex.search(""):
        raise ConfigError(
            f"the rules {path} are wrong: the regex of {rule.name!r} matches the empty text, so it "
            "would match everywhere"
        )
    replacement = f"[redacted: {rule.name}]" if rule.replace is None else rule.replace
    return Pattern(rule.name, regex, replacement)
