"""Search of the text that token ids decode to.

Each token is decoded once, with a few before it, and again where its part is searched alone.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import TypeAlias

from localtrace.redaction.defaults import AROUND_CHARS
from localtrace.redaction.found import Found, mark
from localtrace.redaction.rules import Expression, Rules
from localtrace.store.tokenizers import Decode
from localtrace.store.whole_prompts import shared_prefix

Sequence: TypeAlias = list[list[int]]
"""Token ids in their parts: a prompt and what was generated after it, or the rows of a list."""
TextOf: TypeAlias = Callable[[list[int]], str | None]
"""Turns token ids into text; None where no tokenizer decodes them."""

_WINDOW_IDS = 256
"""Tokens before a turn in which a key may begin that goes on in the turn."""
_BASES_TRIED = 8
_PARTS_OF_KEY_MAX = 4
_SEAM_IDS = 2
"""Tokens on each side of a seam that tell which signs meet there."""
_PIECE_MIN_CHARS = 6


@dataclass(slots=True)
class Spelled:
    """Findings in the text that ids decode to."""

    found: bool = False
    pieces: list[Expression] = field(default_factory=list)
    """Patterns for keys that no rule finds in every text: the parts of one that is cut where a
    prompt or an output begins, and one that is whole there but hidden by letters that touch it. The
    longest come first, because one may contain another."""
    unread: bool = False
    """True if there are ids that no tokenizer decodes."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A sequence that has been searched."""

    ids: list[int]
    cuts: list[int]
    """Offsets at which an output, or a prompt's new part, begins."""
    look_back: int
    """Offset at which to start in a sequence that continues it, before a key that may go on."""


def spelled(rules: Rules, run_id: str, sequences: Iterable[Sequence], decode: Decode) -> Spelled:
    """Search the text of one trajectory's ids, each sequence from where it is new.

    Parts are also searched without those around them where letters of the two touch: joined, these
    may hide a key.
    """
    result = Spelled()
    before: deque[_Read] = deque(maxlen=_BASES_TRIED)

    def text_of(ids: list[int]) -> str | None:
        # Negative ids are padding, which no tokenizer accepts.
        has_padding = min(ids, default=0) < 0
        return decode(run_id, [one for one in ids if one >= 0] if has_padding else ids)

    for parts in sequences:
        whole = [*chain.from_iterable(parts)]
        known, cuts, start = _known(before, whole)
        if known == len(whole):
            continue
        ends = [*accumulate(map(len, parts))]
        # A prompt is new from where it is not known any more; an output is new as a whole.
        first = known if known < ends[0] else max(end for end in (0, *ends) if end <= known)
        cuts = sorted({*cuts, first, *ends[:-1]})
        look_back = max(0, len(whole) - _WINDOW_IDS)
        text = text_of(whole[start:])
        if text is None:
            result.unread = True
            text = ""
        matches = rules.search(text)
        if matches:
            result.found = True
            places = _places(whole, [start, *(cut for cut in cuts if cut >= start)], text_of)
            for found in matches:
                # The cut may also stand between the match and the word that gives it away.
                if any(found.start - AROUND_CHARS <= place <= found.end for place in places):
                    result.pieces += _pieces(text, found, places)
            if matches[-1].end == len(text):
                look_back = min(look_back, start)
        shown = [text[found.start : found.end] for found in matches]
        seams = sorted({start, *(cut for cut in cuts if cut > start), len(whole)})
        runs = _touched(whole, seams, known, text_of, is_any=rules.has_patterns)
        for pieces in _hidden(rules, whole, runs, text_of, shown):
            result.found = True
            result.pieces += pieces
        before.appendleft(_Read(whole, cuts, look_back))
    result.pieces.sort(key=lambda piece: -len(piece.regex.pattern))
    return result


def _places(whole: list[int], offsets: list[int], text_of: TextOf) -> list[int]:
    """Return where the tokens at offsets stand in the text that begins at the first offset."""
    start, *cuts = offsets
    return [len(text_of(whole[start:cut]) or "") for cut in cuts]


def _hidden(
    rules: Rules, whole: list[int], runs: Iterable[list[int]], text_of: TextOf, shown: list[str]
) -> Iterator[list[Expression]]:
    """Yield patterns for each match in runs of parts; none for one that is shown already."""
    for run in runs:
        text = text_of(whole[run[0] : run[-1]]) or ""
        for found in rules.search(text):
            if any(text[found.start : found.end] in key for key in shown):
                yield []
            else:
                yield [*_pieces(text, found, _places(whole, run[:-1], text_of))]


def _touched(
    whole: list[int], seams: list[int], known: int, text_of: TextOf, *, is_any: bool
) -> Iterator[list[int]]:
    """Yield runs of parts with letters of another part right before or after them.

    A run is given by the seams at which its parts begin and end. It has several parts where a key
    may be cut at a seam within it and touched by letters at its other end: such a key fills the
    part at that end, which is short.

    Args:
        seams: offsets at which parts begin and end; the first may lie within a part.
        known: number of ids that were searched before.
        is_any: True to take every seam for one that letters touch.
    """
    touching = {
        seam
        for seam in seams
        if seams[0] < seam < len(whole) and (is_any or not _is_between_words(whole, seam, text_of))
    }
    for begin in range(len(seams) - 1):
        for end in range(begin + 1, min(begin + _PARTS_OF_KEY_MAX, len(seams) - 1) + 1):
            run = seams[begin : end + 1]
            ends = ((run[0], run[1] - run[0]), (run[-1], run[-1] - run[-2]))
            if run[-1] > known and any(
                seam in touching and (len(run) == 2 or size <= _WINDOW_IDS) for seam, size in ends
            ):
                yield run


def _is_between_words(whole: list[int], seam: int, text_of: TextOf) -> bool:
    """Return whether white space or an angle bracket is beside a seam.

    By the default rules it divides words as the end of a text does.
    """
    left = text_of(whole[max(0, seam - _SEAM_IDS) : seam]) or ""
    right = text_of(whole[seam : seam + _SEAM_IDS]) or ""
    return any(sign.isspace() or sign in ("<", ">") for sign in (left[-1:], right[:1]))


def _known(before: Iterable[_Read], whole: list[int]) -> tuple[int, list[int], int]:
    """Return how many leading ids an earlier sequence shares, its cuts there, and the start."""
    longest, nearest = 0, _Read([], [], 0)
    for read in before:
        if len(read.ids) > longest and whole[: len(read.ids)] == read.ids:
            return len(read.ids), read.cuts, read.look_back
        shared = shared_prefix(read.ids, whole)
        if shared > longest:
            longest, nearest = shared, read
    start = max(0, min(longest - _WINDOW_IDS, nearest.look_back))
    return longest, [cut for cut in nearest.cuts if cut < longest], start


def _pieces(text: str, found: Found, cuts: list[int]) -> Iterator[Expression]:
    """Yield patterns for the parts of a match that cuts divide."""
    first, last = found.start, found.end
    inside = sorted({cut for cut in cuts if first < cut < last})
    for start, end in pairwise([first, *inside, last]):
        letters = text[start:end].strip()
        if len(letters) >= _PIECE_MIN_CHARS:
            yield Expression(found.name, re.compile(re.escape(letters)), mark(found.name))
