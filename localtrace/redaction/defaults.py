"""The default rules: keys of known shapes, headers, URLs, and secrets given away by names."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator

from localtrace.redaction import assignments, encoded_words, shapes
from localtrace.redaction.found import Found

CHARS_MIN = 7
"""Length of the shortest text in which a rule can find anything."""
AROUND_CHARS = 80
"""Distance before a match within which the word must stand that gives it away."""

_SCHEMES = {
    "bearer header": (r"[ \t]{1,4}([A-Za-z0-9._~+/-]{16,}+={0,2})", "earer", "EARER"),
    "basic header": (
        r"[ \t]{1,4}([A-Za-z0-9+/_-]{8,}+={0,2})",
        "asic", "ASIC",
    ),
}  # fmt: skip
_HEADERS = tuple(
    # Each begins with literal letters, which `re` finds fast.
    (name, word, re.compile(word + rest))
    for name, (rest, *words) in _SCHEMES.items()
    for word in words
)
_PEM_BEGIN = r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
_PEM_END = r"-----END (?:[A-Z0-9]{1,20} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
_PEM = re.compile(
    # A key that was cut off has no end line; it ends where its letters end.
    rf"{_PEM_BEGIN}(?:[^-]*+(?:-(?!----)[^-]*+)*+{_PEM_END}|[A-Za-z0-9+/=:,\s\\-]*+)"
)
_PUTTY = re.compile(r"Private-Lines: \d+\s+(?:[A-Za-z0-9+/=]{1,64}\s+)*+")
_URL = re.compile(
    r"://(?P<user>[^\s/:@\"'`\[<>(){}]{0,200}+):"
    # a number before a path is a port and no password
    r"(?!\d{1,5}(?![\w@.~!$%&*+=-]))"
    # the password goes up to the last @; another address ends the search, and so may a quote
    r"(?P<rest>(?:[^\s\"'`:<>]++|:(?!//)|['`](?![\s,:;)\]}]))*+)"
)
_URL_TOKEN = re.compile(r"://(?P<token>[A-Za-z0-9_-]{20,200})@(?=[A-Za-z0-9])")
_STANDS_FOR = re.compile(r"\{[^{}]*\}|\$\{[^{}]*\}|\$[A-Z_]+|%s|\*+|x{3,}|X{3,}|\.{3}|…")
_TOLD_BY_WORDS = (
    # Hex without a letter, or without a digit, is practically never a key.
    ("w&b key",
     re.compile(r"(?<![0-9A-Za-z])(?=[0-9]{0,39}[a-f])(?=[a-f]{0,39}[0-9])[0-9a-f]{40}(?![0-9A-Za-z])"),
     re.compile("wandb|secret|passw|credential"
                "|(?:api|access|auth|private|session|bearer)[ _-]?(?:key|token)")),
    ("aws secret key",
     re.compile(r"(?<![A-Za-z0-9+/=])(?=[^0-9]{0,39}[0-9])(?=[^A-Z]{0,39}[A-Z])(?=[^a-z]{0,39}[a-z])"
                r"[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/=])"),
     re.compile("a[ks]ia|aws|secret|access.?key")),
)  # fmt: skip
"""Keys of 40 letters without a prefix, which only a word before them gives away."""
_TOLD_CHARS = 40
_NETRC = re.compile(r"\blogin\s{1,20}\S{1,200}\s{1,20}password\s{1,20}(\S{1,400}+)")
_CURL = re.compile(r"\s(?:-u|--user|--proxy-user)[ =]{1,4}[\"']?([^\s\"':]{1,200}:[^\s\"']{1,200})")
_SSHPASS = re.compile(r"\bsshpass\s{1,4}-p\s{0,4}[\"']?([^\s\"']{1,200})")
_SQL = re.compile(
    r"(?i:\b(?:alter|create)\s{1,4}(?:user|role|login)\s[^;\n]{0,200}?"
    r"\b(?:password|by)\s{1,4})'([^'\n]{1,400})'"
)
_LOGINS = (
    (("login",), _NETRC),
    (("curl",), _CURL),
    (("sshpass",), _SSHPASS),
    (("assword '", "ASSWORD '", "by '", "BY '"), _SQL),
)
"""Commands that hold a password, each with words of which a text holds one."""
_ENCODED_TWICE_MAX = 3

NAMES = (
    *shapes.NAMES, "bearer header", "basic header", "private key", "password in a url",
    "token in a url", "aws secret key", "password of a login", assignments.NAME,
    encoded_words.NAME,
)  # fmt: skip


def find_defaults(
    text: str, before: str = "", *, has_names: bool = True, is_strict: bool = False
) -> Iterator[Found]:
    """Yield the secrets of a text, in no order; they may overlap.

    Args:
        before: the text that stands before it.
        has_names: also look for secrets by the names before them.
        is_strict: take more values for secrets; for commands and configurations, where a value
            removed for nothing costs little.
    """
    return _find(text, before, has_names, is_strict, _ENCODED_TWICE_MAX)


def _find(
    text: str, before: str, has_names: bool, is_strict: bool, decodings: int
) -> Iterator[Found]:
    words = shapes.long_words(text)
    if not words or not decodings:
        yield from _find_plain(text, before, words, has_names, is_strict)
        return

    def search(decoded: str, is_told: bool) -> Iterator[Found]:
        return _find(decoded, "", has_names, is_strict or is_told, decodings - 1)

    known = [*_find_plain(text, before, words, has_names, is_strict)]
    yield from known
    yield from encoded_words.find_encoded(words, known, search)


def _find_plain(
    text: str, before: str, words: list[re.Match[str]], has_names: bool, is_strict: bool
) -> Iterator[Found]:
    if words:
        yield from shapes.find_shapes(text, words)
        yield from _told_by_words(text, before, words)
    if "PRIVATE KEY" in text:
        yield from _each(_PEM, text, "private key")
    if "Private-Lines" in text:
        yield from _each(_PUTTY, text, "private key")
    if "://" in text:
        yield from _in_urls(text)
    for name, word, regex in _HEADERS:
        if word in text:
            for found in _each(regex, text, name, 1):
                if name != "basic header" or _is_login(text[found.start : found.end]):
                    yield found
    for signs, regex in _LOGINS:
        if any(sign in text for sign in signs):
            yield from _each(regex, text, "password of a login", 1)
    if has_names:
        yield from assignments.find_assignments(text, is_strict=is_strict)


def rules_text() -> str:
    """Return the expressions that decide what is found here, for a digest of the rules."""
    commands = [regex for _, regex in _LOGINS] + [regex for _, _, regex in _HEADERS]
    own = (_PEM, _PUTTY, _URL, _URL_TOKEN, *commands)
    told = [regex for _, *both in _TOLD_BY_WORDS for regex in both]
    return "\n".join([shapes.rules_text(), *(regex.pattern for regex in (*own, *told))])


def _each(regex: re.Pattern[str], text: str, name: str, group: int = 0) -> Iterator[Found]:
    for match in regex.finditer(text):
        yield Found(*match.span(group), name)


def _is_login(letters: str) -> bool:
    """Return whether base64 text decodes to a name and a password."""
    try:
        return b":" in base64.b64decode(letters.rstrip("=") + "==", "-_")
    except ValueError:
        return False


def _in_urls(text: str) -> Iterator[Found]:
    for match in _URL.finditer(text):
        password = match["rest"].rpartition("@")[0]
        if password and not _STANDS_FOR.fullmatch(password):
            end = match.start("rest") + len(password)
            yield Found(match.start("user"), end, "password in a url")
    for match in _URL_TOKEN.finditer(text):
        if any(map(str.isdigit, match["token"])):
            yield Found(*match.span("token"), "token in a url")


def _told_by_words(text: str, before: str, words: Iterable[re.Match[str]]) -> Iterator[Found]:
    for word in words:
        start, end = word.span()
        if end - start < _TOLD_CHARS:
            continue
        for name, regex, after in _TOLD_BY_WORDS:
            for match in regex.finditer(text, start, end):
                near = text[max(0, match.start() - AROUND_CHARS) : match.start()]
                if match.start() < AROUND_CHARS:
                    near = f"{before[-AROUND_CHARS:]} {near}"
                if after.search(near.lower()):
                    yield Found(*match.span(), name)
