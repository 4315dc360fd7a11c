"""Recorded texts as HTML: text stays text, and characters that are not seen are shown.

Nothing recorded becomes an element, a link or an attribute. Fenced and inline code, headings and
bold text are set apart as in Markdown; everything else stays as it was written, line by line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from markupsafe import Markup, escape

from localtrace.terminal import UNSAFE

_CODE = re.compile(r"^(```|~~~)[^\n`]*\n(.*?)(?:^\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(
    r"(?P<code>`[^`\n]+`)|(?P<bold>\*\*(?=\S)[^*\n]+(?<=\S)\*\*)|(?P<heading>^#{1,6} [^\n]+)"
    r"|(?P<mark><\|[^|<>\n]{1,40}\|>|<｜[^｜<>\n]{1,40}｜>|</?[a-z_]{1,24}>)",
    re.MULTILINE,
)
_MARK = re.compile(r"<\|[^|<>\n]{1,40}\|>|<｜[^｜<>\n]{1,40}｜>|</?[a-z_]{1,24}>")
"""Marks of chat templates and of tags such as <think>, which are shown smaller."""
_NAMES = {
    "\x00": "NUL",
    "\x1b": "ESC",
    "\r": "CR",
    "\u200b": "ZWSP",
    "\u202e": "RLO",
    "\ufeff": "BOM",
}


@cache
def _hidden() -> re.Pattern[str]:
    # Joiners and variation selectors after a sign are part of an emoji, so they stay.
    return re.compile(f"(?![\\ufe0f\\u200d](?<=[\\u2190-\\U0001faff].))[{UNSAFE}]")


def plain(text: str) -> str:
    """Return text with hidden characters as visible names, such as ⟨RLO⟩; tabs and lines stay."""
    return _hidden().sub(lambda match: f"⟨{_name(match[0])}⟩", text)


def exact(text: str) -> Markup:
    """Return text as HTML, with every hidden character marked."""
    pieces, at = [], 0
    for match in _hidden().finditer(text):
        pieces.append(escape(text[at : match.start()]))
        pieces.append(_chip(match[0]))
        at = match.end()
    pieces.append(escape(text[at:]))
    return Markup("").join(pieces)


def marked(text: str) -> Markup:
    """Return text as HTML, with the marks of chat templates set apart."""
    pieces, at = [], 0
    for match in _MARK.finditer(text):
        pieces += [exact(text[at : match.start()]), _template_mark(match[0])]
        at = match.end()
    return Markup("").join([*pieces, exact(text[at:])])


def readable(text: str) -> Markup:
    """Return text as HTML, with code, headings and bold text set apart."""
    pieces, at = [], 0
    for match in _CODE.finditer(text):
        pieces.append(_prose(text[at : match.start()]))
        pieces.append(Markup('<code class="block">') + exact(match[2]) + Markup("</code>"))
        at = match.end()
    return Markup("").join([*pieces, _prose(text[at:])])


def with_hits(text: str, hits: Iterable[tuple[int, int, bool]]) -> Markup:
    """Return text as HTML, as `marked` does, with the hits of a search set apart.

    Args:
        text: the text.
        hits: begin and end of each in their order, and whether it is the one that is shown.
    """
    pieces, at = [], 0
    for start, end, is_here in hits:
        tag = Markup('<mark id="here">') if is_here else Markup("<mark>")
        pieces += [marked(text[at:start]), tag, exact(text[start:end]), Markup("</mark>")]
        at = end
    return Markup("").join([*pieces, marked(text[at:])])


def _prose(text: str) -> Markup:
    pieces, at = [], 0
    for match in _INLINE.finditer(text):
        pieces.append(exact(text[at : match.start()]))
        pieces.append(_set_apart(match))
        at = match.end()
    return Markup("").join([*pieces, exact(text[at:])])


def _set_apart(match: re.Match[str]) -> Markup:
    text = match[0]
    if match["code"]:
        return Markup("<code>") + exact(text[1:-1]) + Markup("</code>")
    if match["bold"]:
        return Markup("<strong>") + exact(text[2:-2]) + Markup("</strong>")
    if match["heading"]:
        return Markup("<strong>") + exact(text) + Markup("</strong>")
    return _template_mark(text)


def _template_mark(text: str) -> Markup:
    return Markup('<span class="mark">') + exact(text) + Markup("</span>")


def _chip(sign: str) -> Markup:
    return Markup('<span class="hidden-sign" title="{}">{}</span>').format(_code(sign), _name(sign))


def _name(sign: str) -> str:
    return _NAMES.get(sign) or _code(sign)


def _code(sign: str) -> str:
    return f"U+{ord(sign):04X}"
