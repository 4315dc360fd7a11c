"""Rules of redaction: the shapes of common keys, and what a user's file adds.

Shapes follow what the issuers document. None repeats a repetition, so time grows with the text.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from localtrace.errors import ConfigError
from localtrace.schema import (
    FINISH_NAMES,
    LOGPROB_NAMES,
    MASK_NAMES,
    MESSAGE_NAMES,
    OUTPUT_NAMES,
    OUTPUT_TEXT_NAMES,
    PROMPT_NAMES,
    WEIGHT_NAMES,
)

AROUND_CHARS = 40
"""How far before a match the word may stand that it must come after."""


def mark(name: str) -> str:
    """What stands where the rule of this name found something."""
    return f"[redacted: {name}]"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that must not leave."""

    name: str
    regex: re.Pattern[str]
    replacement: str
    anchors: tuple[str, ...] = ()
    """One of these is in the lower case of every text with a match; none: not known."""
    after: re.Pattern[str] | None = None
    """What must stand shortly before a match."""
    hint: re.Pattern[str] | None = None
    """What every match holds, and what is found faster."""

    def matches(self, text: str, before: str = "") -> Iterator[re.Match[str]]:
        """Matches in a text that comes after another one."""
        for match in self.regex.finditer(text):
            start = match.start()
            near = text[max(0, start - AROUND_CHARS) : start]
            if start < AROUND_CHARS:
                near = f"{before[-AROUND_CHARS:]} {near}"
            if match[0] and (self.after is None or self.after.search(near)):
                yield match

    def replaced(self, text: str, before: str = "") -> tuple[str, int]:
        """The text without its matches, and how many were replaced."""
        parts, end, count = [], 0, 0
        for match in self.matches(text, before):
            parts += [text[end : match.start()], self.replacement]
            end = match.end()
            count += match[0] != self.replacement
        return "".join([*parts, text[end:]]), count


def _begin(prefix: str) -> str:
    """A prefix that begins a word, also after an escape of JSON, URLs or terminals.

    The prefix comes first and is looked back at, because `re` finds leading literals fast.
    """
    escapes = (r"\\[bfnrt]", r"\\u[0-9A-Fa-f]{4}", r"%[0-9A-Fa-f]{2}", r"[0-9\[]m")
    behind = "".join(f"|(?<={escape}{prefix})" for escape in escapes)
    return f"{prefix}(?:(?<![A-Za-z0-9]{prefix}){behind})"


def _key(name: str, regex: str, *anchors: str, around: str = "{}") -> Pattern:
    return Pattern(name, re.compile(regex), around.format(mark(name)), anchors)


_KEY_WORDS = re.compile(
    "wandb|secret|passw|credential|(?:api|access|auth|private|session|bearer)[ _-]?(?:key|token)",
    re.IGNORECASE,
)
_PEM = r"-----{} (?:[A-Z0-9]{{1,20}} ){{0,3}}PRIVATE KEY(?: BLOCK)?-----"

DEFAULTS = (
    # A digit or a capital tells keys from words such as sk-learn-based-classification.
    _key(
        "openai or anthropic key",
        _begin("sk-") + r"(?=[a-z_-]{0,60}[0-9A-Z])[A-Za-z0-9_-]{20,}",
        "sk-",
    ),
    _key("hugging face token", _begin("hf_") + "[A-Za-z0-9]{30,}", "hf_"),
    _key(
        "github token",
        _begin("gh[opsur]_") + "[A-Za-z0-9]{30,}|" + _begin("github_pat_") + r"\w{30,}",
        *("ghp_", "gho_", "ghs_", "ghu_", "ghr_", "github_pat_"),
    ),
    _key(
        "gitlab token",
        _begin("glpat-") + r"[A-Za-z0-9_-]{20,}(?:\.[0-9a-z]{2}\.[0-9a-z]{7,12})?",
        "glpat-",
    ),
    _key(
        "aws access key",
        _begin("A[KS]IA") + "[A-Z0-9]{16}(?![A-Za-z0-9])",
        *("akia", "asia"),
    ),
    _key("google api key", _begin("AIza") + "[A-Za-z0-9_-]{35}", "aiza"),
    _key("slack token", _begin("xox[a-z]-") + "[A-Za-z0-9-]{10,}", "xox"),
    _key("w&b key", _begin("wandb_v1_") + r"\w{20,}", "wandb_v1_"),
    Pattern(
        "w&b key",
        re.compile(_begin("[0-9a-f]{40}") + "(?![0-9A-Za-z])"),
        mark("w&b key"),
        after=_KEY_WORDS,
        # So many digits and no number among the first of them: one of millions of keys.
        hint=re.compile("[0-9][0-9a-f]{19}"),
    ),
    _key(
        "json web token",
        _begin("eyJ") + r"[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}(?:\.[A-Za-z0-9_-]*)?",
        "eyj",
    ),
    _key(
        "bearer header",
        r"[Bb](?:earer|EARER)[ \t]{1,4}[A-Za-z0-9._~+/-]{16,}={0,2}",
        "earer",
        around="Bearer {}",
    ),
    # One that was cut off ends where its letters end.
    _key(
        "private key",
        _PEM.format("BEGIN")
        + r"(?:(?:[^-]|-(?!----)){0,20000}"
        + _PEM.format("END")
        + r"|[A-Za-z0-9+/=:,\s\\-]{0,20000})",
        "private key",
    ),
    _key(
        "password in a url",
        r"://[^\s/:@\"'\[]{0,200}:[^\s/@\"']{1,1000}@",
        "://",
        around="://{}@",
    ),
)
"""What never leaves unless a file says `defaults = false`."""

_PROMPT = {*PROMPT_NAMES, "prompt_text"}
_OUTPUT = {*OUTPUT_NAMES, "output_text", "response_text"}
_TOGETHER: tuple[tuple[set[str], set[str]], ...] = (
    (set(MESSAGE_NAMES), {*MESSAGE_NAMES, *_PROMPT}),
    (_OUTPUT | set(OUTPUT_TEXT_NAMES), _OUTPUT | _PROMPT),
    (_PROMPT, _PROMPT),
    *((set(names), set(names)) for names in (LOGPROB_NAMES, MASK_NAMES, FINISH_NAMES)),
    (set(WEIGHT_NAMES), set(WEIGHT_NAMES)),
)
"""Names of one thing, and all the names under which it or what spells it is recorded."""


class Rules:
    """Patterns in texts, and names of fields whose values are left out.

    Args:
        fields: a field that holds the messages, the prompt or the output takes with it what else
            spells them.
    """

    def __init__(self, patterns: tuple[Pattern, ...], fields: Iterable[str] = ()) -> None:
        self.patterns = patterns
        self.named_fields = sorted(set(fields))
        named = frozenset(self.named_fields)
        self.fields = named.union(*(together for any_of, together in _TOGETHER if any_of & named))
        names = [*(pattern.name for pattern in patterns), *self.named_fields]
        self._marks = re.compile(f"({'|'.join(re.escape(mark(name)) for name in names)})")

    def parts(self) -> list[Any]:
        """Everything that decides what is redacted."""
        patterns = [
            [p.name, p.regex.pattern, p.regex.flags, p.replacement, p.after and p.after.pattern]
            for p in self.patterns
        ]
        return [patterns, self.named_fields]

    def describe(self) -> str:
        """The rules in words."""
        count = sum(pattern in DEFAULTS for pattern in self.patterns)
        names = [pattern.name for pattern in self.patterns if pattern not in DEFAULTS]
        texts = [
            "common shapes of keys" if count else "no default patterns",
            *([f"the patterns {', '.join(names)}"] if names else []),
            *([f"the fields {', '.join(self.named_fields)}"] if self.named_fields else []),
        ]
        return "; ".join(texts)

    def suspects(self, text: str) -> list[Pattern]:
        """The patterns that may match: a quick look that spares most texts the rest."""
        folded = text.lower()
        found = []
        for pattern in self.patterns:
            # Plain loops: this runs for every text that leaves.
            for anchor in pattern.anchors:
                if anchor in folded:
                    break
            else:
                if pattern.anchors:
                    continue
            if pattern.hint is None or pattern.hint.search(text) is not None:
                found.append(pattern)
        return found

    def first_match(self, text: str) -> Pattern | None:
        """The first pattern that matches outside of marks."""
        for pattern in self.suspects(text):
            if any(any(pattern.matches(part)) for part in self.parts_between_marks(text)[::2]):
                return pattern
        return None

    def parts_between_marks(self, text: str) -> list[str]:
        """The text in parts, of which every second one is a mark of these rules."""
        return self._marks.split(text) if "[redacted: " in text else [text]


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
    """The default rules, and those of a TOML file.

    The file has `[[pattern]]` tables with `name`, `regex` (Python's `re`) and optionally `replace`
    (plain text), `[[field]]` tables with `name`, and optionally `defaults = false`.

    Raises:
        ConfigError: the file cannot be read, or a rule in it is wrong.
    """
    if path is None:
        return Rules(DEFAULTS)
    try:
        given = msgspec.convert(tomllib.loads(path.read_text("utf-8")), _File)
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
    return Rules((*patterns, *(DEFAULTS if given.defaults else ())), fields)


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


def _compiled(path: Path, where: str, rule: _Pattern) -> Pattern:
    try:
        regex = re.compile(rule.regex)
    except (re.error, OverflowError, RecursionError) as error:
        raise _wrong(path, f"{where} ({rule.name!r})", f"not a regular expression, {error}") from (
            error
        )
    if regex.search(""):
        raise _wrong(path, f"{where} ({rule.name!r})", "its regex matches the empty text")
    pattern = Pattern(rule.name, regex, mark(rule.name) if rule.replace is None else rule.replace)
    if rule.replace is not None and pattern.replaced(rule.replace)[0] != rule.replace:
        raise _wrong(path, f"{where} ({rule.name!r})", "its regex matches what it is replaced by")
    return pattern
