"""Search of the text that token ids decode to.

A trajectory shows its text in parts: what each prompt adds, and each answer. A key may lie in one
of them, be cut where two meet, or be hidden where letters of another part touch it. So each part is
searched alone, and with up to three parts before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import TypeAlias

from localtrace.redaction.rules import Rules
from localtrace.store.whole_prompts import shared_prefix

Parts: TypeAlias = list[list[int]]
"""Token ids in their parts: a prompt and what was generated after it, or the rows of a list."""
TextOf: TypeAlias = Callable[[list[int]], str | None]
"""Turns token ids into text; None where no tokenizer decodes them."""

_BASES_MAX = 8
_PARTS_MAX = 4
_BEFORE_CHARS = 4000
"""Text before a part in which a key may begin that goes on in the part; private keys are long."""
_PIECE_MIN_CHARS = 6


@dataclass(slots=True)
class Spelled:
    """Findings in the text that ids decode to."""

    pieces: dict[str, str] = field(default_factory=dict)
    """The letters of each match in each part, with the name of the rule: no rule finds them where
    a part is shown alone, or where other letters touch it."""
    is_found: bool = False
    is_unread: bool = False
    """True if there are ids that no tokenizer decodes."""


def spelled(rules: Rules, sequences: Iterable[Parts], text_of: TextOf) -> Spelled:
    """Search the text of one trajectory's ids, each sequence from where it is new."""
    result = Spelled()
    bases: list[tuple[list[int], dict[tuple[int, int], str]]] = [([], {})]
    for parts in sequences:
        ids = [*chain.from_iterable(parts)]
        shared = [(shared_prefix(base, ids), texts) for base, texts in bases[-_BASES_MAX:]]
        known, base_texts = max(shared, key=lambda base: base[0])
        ends = [*accumulate(map(len, parts))]
        # A prompt is new from where it is not known any more; an answer is new as a whole.
        new = known if known < ends[0] else max(end for end in ends if end <= known)
        before = {start for start, _ in base_texts if start < min(known, ends[0])}
        spans = [*pairwise(sorted({0, new, *ends, *before}))]
        texts = {}
        for start, end in spans:
            text = base_texts.get((start, end)) if end <= known else None
            text = text_of(ids[start:end]) if text is None else text
            result.is_unread |= text is None
            texts[start, end] = text or ""
        bases.append((ids, texts))
        _search(rules, result, [*texts.values()], sum(start < new for start, _ in spans))
    return result


def _search(rules: Rules, result: Spelled, texts: list[str], known: int) -> None:
    """Search parts from the one at place `known` on, alone and with those before them."""
    for last in range(known, len(texts)):
        for count in range(1, min(_PARTS_MAX, last + 1) + 1):
            run = texts[last - count + 1 : last + 1]
            run[0] = run[0] if count == 1 else run[0][-_BEFORE_CHARS:]
            starts = accumulate(map(len, run), initial=0)
            matches = rules.search("".join(run))
            result.is_found |= bool(matches)
            for text, start in zip(run, starts, strict=False):
                for match in matches:
                    piece = text[max(0, match.start - start) : max(0, match.end - start)].strip()
                    if len(piece) >= _PIECE_MIN_CHARS:
                        result.pieces.setdefault(piece, match.name)
