"""The rules of a `gitleaks.toml`, run in linear time by RE2, for which they are written.

Used are the keys that find secrets (`regex`, `keywords`, `secretGroup`, `entropy`) and those that
allow some (`allowlists` with `regexes` and `stopwords`). Conditions on names of files have no
meaning here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import re2

from localtrace.redaction.matches import Match


class _Allowed(msgspec.Struct, rename="camel"):
    regexes: list[str] = []
    stopwords: list[str] = []
    regex_target: str = "secret"
    condition: str = "OR"
    paths: list[str] = []
    commits: list[str] = []


class _Rule(msgspec.Struct, rename="camel"):
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    regex: str | None = None
    keywords: list[str] = []
    secret_group: int = 0
    entropy: float = 0
    allowlists: list[_Allowed] = []
    allowlist: _Allowed | None = None


class _File(msgspec.Struct):
    rules: list[_Rule]
    allowlist: _Allowed | None = None
    allowlists: list[_Allowed] = []


@dataclass(frozen=True, slots=True)
class GitleaksRule:
    """One rule, compiled, with the allowlists that apply to it."""

    name: str
    regex: Any
    keywords: list[str]
    group: int
    entropy: float
    allowed: list[tuple[_Allowed, list[Any]]]

    def find(self, text: str) -> Iterator[Match]:
        """Yield its matches."""
        folded = text.lower()
        if self.keywords and not any(word.lower() in folded for word in self.keywords):
            return
        for match in self.regex.finditer(text):
            groups = range(1, self.regex.groups + 1)
            start, end = match.span(self.group or next((n for n in groups if match[n]), 0))
            if start == end or _entropy(text[start:end]) < self.entropy:
                continue
            before, after = text.rfind("\n", 0, start) + 1, text.find("\n", end)
            line = text[before : None if after < 0 else after]
            targets = {"secret": text[start:end], "match": match[0], "line": line}
            if not any(_allows(rule, regexes, targets) for rule, regexes in self.allowed):
                yield Match(start, end, self.name)


def read_rules(tables: dict[str, Any]) -> list[GitleaksRule]:
    """Return the rules of a file that was read as TOML.

    Raises:
        ValueError: a rule is wrong.
    """
    file = msgspec.convert(tables, _File)
    everywhere = [*file.allowlists, *([file.allowlist] if file.allowlist else [])]
    rules = []
    for rule in file.rules:
        if rule.regex is None:
            continue
        lists = [*rule.allowlists, *([rule.allowlist] if rule.allowlist else []), *everywhere]
        allowed = [(allowed, [*map(_compiled, allowed.regexes)]) for allowed in lists]
        regex = _compiled(rule.regex)
        if not 0 <= rule.secret_group <= regex.groups:
            raise ValueError(f"rule {rule.id!r} has no group {rule.secret_group}")
        rules.append(
            GitleaksRule(rule.id, regex, rule.keywords, rule.secret_group, rule.entropy, allowed)
        )
    return rules


def _compiled(expression: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(expression, options=options)
    except re2.error as error:
        raise ValueError(f"{expression[:80]!r}: {error}") from error


def _allows(rule: _Allowed, regexes: list[Any], targets: dict[str, str]) -> bool:
    target, folded = targets.get(rule.regex_target, targets["secret"]), targets["secret"].lower()
    checks = []
    if regexes:
        checks.append(any(regex.search(target) is not None for regex in regexes))
    if rule.stopwords:
        checks.append(any(word.lower() in folded for word in rule.stopwords))
    if rule.condition.upper() == "AND":
        # Files and commits are unknown here, so a list that requires one allows nothing.
        return bool(checks) and all(checks) and not (rule.paths or rule.commits)
    return any(checks)


def _entropy(text: str) -> float:
    """Return the Shannon entropy in bits per character."""
    total = len(text)
    return -sum(n / total * math.log2(n / total) for n in Counter(text).values())
