"""Secrets that only their names give away: `password=…`, `"api_key": "…"`, headers, options.

Such names contain one of a few words, which are searched for first. The letters around the word are
the name, and the value follows a `=` or `:`. Every step looks at a bounded number of letters, so
time grows with the text only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from localtrace.redaction.matches import Match
from localtrace.redaction.names import is_secret, may_be_secret

NAME = "secret by its name"

_WORDS = (
    "pass", "pwd", "secret", "key", "token", "auth", "cred", "cookie", "signature", "connection",
    "bearer", "jwt", "_pw", "_pat", "sig=",
)  # fmt: skip
_BEFORE_CHARS = 40
_NAME_BEFORE = re.compile(rf"[\w.-]{{0,{_BEFORE_CHARS}}}\Z", re.ASCII)
_NAME_AFTER = re.compile(r"[\w-]{0,40}+", re.ASCII)
_EQUALS = re.compile(
    r"(?:\\{0,3}[\"'`]|&quot;|%22)?\]?(?:"
    r"(?P<tight>=(?![=>~]))"
    r"|:\s{0,2}[A-Za-z_][\w.\[\]|]{0,30}\s=(?!=)\s{0,4}"  # the type of a Python variable
    r"|(?P<tag>>)(?=[^\s<>]{1,500}</)"
    r"|(?P<loose>\s{0,4}(?:=>|:=|:(?!:)|=(?![=~])|%3[AaDd]|\\u003d)\s{0,4}))"
)
_SPACE = re.compile(r"[ \t]{1,4}(?!-)")
_SCHEME = re.compile(r"(?i:basic|bearer|token|digest|api-?key|negotiate|ntlm|key)[ \t]{1,4}")
_OPENS = re.compile(r"(\\{0,3})([\"'`])")
_QUOTED = {
    # A text between escaped quotes ends at the next escaped quote.
    (quote, is_escaped): re.compile(rf"[^\n{quote}\\]*+(?:{after_backslash}[^\n{quote}\\]*+)*+")
    for quote in "\"'`"
    for is_escaped, after_backslash in (
        (True, rf"\\(?![{quote}\\])"),
        (False, r"\\[^\n]"),
    )
}
_BARE = re.compile(r"[^\s\"'`,;&<>(){}\[\]\\]{1,4000}+")
_COOKIES = re.compile(r"[^\n\"'`\\]{1,4000}+")
_CODE = re.compile(r"[A-Za-z_]+_\w*|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+", re.ASCII)
"""Names of variables and attributes in code, which are no values."""
_PROSE = re.compile(r"[A-Za-z]+(?:[-'./][A-Za-z]+)*[.!?:]?|\d+[.):]?")
_CHARS_MIN = 3
_LOWER = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}


def find_assignments(text: str, *, is_strict: bool = False) -> Iterator[Match]:
    """Yield the values that stand under names of secrets.

    Args:
        is_strict: take more values for secrets; for commands and configurations, where a value
            removed for nothing costs little.
    """
    folded = text.lower()
    if len(folded) != len(text):
        folded = text.translate(_LOWER)
    # Faster than one regular expression: most texts contain few of the words.
    words = [word for word in _WORDS if word in folded]
    places = [match.start() for word in words for match in re.finditer(word, folded)]
    end = 0
    for place in sorted(places):
        match = _after_name(text, place, is_strict) if place >= end else None
        if match is not None:
            yield match
            end = match.end


def _after_name(text: str, place: int, is_strict: bool) -> Match | None:
    named = _NAME_AFTER.match(text, place)
    stop = place if named is None else named.end()
    equals = _EQUALS.match(text, stop)
    if equals is None and text[stop : stop + 1] not in (" ", "\t"):
        return None
    before = _NAME_BEFORE.search(text[max(0, place - _BEFORE_CHARS) : place])
    name = ("" if before is None else before[0]) + text[place:stop]
    if not may_be_secret(name):
        return None
    if equals is None and name.startswith("-"):  # the value of an option follows after a space
        equals = _SPACE.match(text, stop)
    return None if equals is None else _value(text, name, equals, is_strict)


def _value(text: str, name: str, equals: re.Match[str], is_strict: bool) -> Match | None:
    start, end = equals.end(), len(text)
    opens = _OPENS.match(text, start)
    if opens is not None:
        quoted = _QUOTED[opens[2], bool(opens[1])].match(text, opens.end())
        start, end = (opens.end(), opens.end()) if quoted is None else quoted.span()
    scheme = _SCHEME.match(text, start, end)
    start = start if scheme is None else scheme.end()
    if opens is None:
        is_cookie = name.lower().endswith(("cookie", "cookies"))
        bare = (_COOKIES if is_cookie else _BARE).match(text, start)
        if bare is None:
            return None
        if not (is_strict or scheme or _may_stand_bare(text, bare, equals)):
            return None
        end = bare.end()
    if not is_secret(name, text[start:end], is_strict=is_strict):
        return None
    return Match(start, end, NAME)


def _may_stand_bare(text: str, bare: re.Match[str], equals: re.Match[str]) -> bool:
    """Tell whether letters without quotes are a value, rather than code or prose."""
    value, after = bare[0], text[bare.end() : bare.end() + 1]
    if len(value) < _CHARS_MIN or after in ("(", "[") or _CODE.fullmatch(value):
        return False
    if equals.lastgroup == "tag":
        return True
    if equals.lastgroup == "tight":
        return not (value.isalpha() and after in (",", ")", "]", "}"))
    return _PROSE.fullmatch(value) is None
