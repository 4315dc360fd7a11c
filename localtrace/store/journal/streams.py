"""The generations in what a generator yielded, whose pieces are joined.

Pieces are texts, lists of ids or single ids; maps of these, each with what is new or with
everything so far; the chunks of OpenAI-compatible servers; or the outputs of SGLang and vLLM. Where
it cannot be told whether pieces hold what is new or everything so far, what they hold is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from localtrace.field_names import LOGPROB_NAMES, MASK_NAMES, OUTPUT_NAMES, OUTPUT_TEXT_NAMES
from localtrace.store.journal.choices import of_openai, of_sglang
from localtrace.store.journal.pieces import merge, merge_sglang
from localtrace.values import codec
from localtrace.values.encoded import is_list, raw_items, raw_map
from localtrace.values.token_lists import read_ids, read_numbers

Fields = dict[str, msgspec.Raw]
_TEXTS = frozenset(OUTPUT_TEXT_NAMES)
_LISTS = frozenset({*OUTPUT_NAMES, *LOGPROB_NAMES, *MASK_NAMES})
_CERTAIN_IDS, _CERTAIN_CHARS = 3, 8
"""Repeated ids or characters that are no coincidence: pieces hold everything so far."""
_NIL = b"\xc0"
Piece = dict[str, Any]


class Joined(NamedTuple):
    """One generation of a stream."""

    fields: Fields
    unusable: int = 0
    """Lists or texts of which it is not known how to join them."""


def yielded(outputs: msgspec.Raw) -> msgspec.Raw:
    """Return the list of what a generator yielded, beside which its result may hold another."""
    return (raw_map(outputs) or {}).get("yielded", outputs)


def joined(outputs: msgspec.Raw) -> list[Joined]:
    """Return the generations whose pieces a generator yielded; none where they are no pieces.

    Args:
        outputs: the list of what was yielded, or a map of it and of what was returned.
    """
    fields = raw_map(outputs) or {}
    items = raw_items(yielded(outputs)) or []
    items = [item for item in items if memoryview(item)[:1] != _NIL]
    last = fields.get("returned")
    if last is None and len(items) > 1 and raw_map(items[0]) is None:
        last = items.pop() if raw_map(items[-1]) is not None else None
    made = _joined(items)
    told = raw_map(last) if last is not None else None
    if told is not None and len(made) < 2:
        made = [made[0]._replace(fields=made[0].fields | told)] if made else [Joined(told)]
    return made


def _joined(items: list[msgspec.Raw]) -> list[Joined]:
    maps = [raw_map(item) for item in items]
    if any(one is not None for one in maps):
        known = [one for one in maps if one is not None]
        return _of_maps(known) if len(known) == len(items) else []
    values = [codec.decode(item) for item in items]
    if values and all(isinstance(one, str) for one in values):
        text = whole(values, _CERTAIN_CHARS)
        return [Joined({}, 1) if text is None else _encoded({"text": sum_of(text or [""])})]
    if values and all(type(one) is int for one in values):
        return [_encoded({"output_ids": values})]
    chunks = [read_ids(item) for item in items]
    if not chunks or any(one is None or not one.is_exact for one in chunks):
        return []
    ids = whole([list(one.values) for one in chunks if one is not None], _CERTAIN_IDS)
    return [Joined({}, 1) if ids is None else _encoded({"output_ids": sum_of(ids or [[]])})]


def whole(pieces: Sequence[Any], certain: int) -> Sequence[Any] | None:
    """Return the pieces that together are the whole: all of them, or only the last.

    Only the last where each goes on from the one before, or where it is all the others, and that
    cannot be a coincidence. None where it may be one.

    Args:
        pieces: texts or lists.
        certain: so many repeated items are no coincidence.
    """
    given = [one for one in pieces if len(one)]
    pairs = list(pairwise(given))
    if all(one == after for one, after in pairs):  # if short, a model that repeats one token
        return None if pairs and len(given[0]) >= certain else given
    if all(after[: len(one)] == one for one, after in pairs):
        repeated = sum(len(one) for one, after in pairs if one != after)
    elif len(given[-1]) == sum(map(len, given[:-1])) and given[-1] == sum_of(given[:-1]):
        repeated = len(given[-1])
    else:
        return given
    return given[-1:] if repeated >= certain else None


def sum_of(pieces: Sequence[Any]) -> Any:
    """Return texts or lists, at least one, put one after the other."""
    if isinstance(pieces[0], str):
        return "".join(pieces)
    return [item for one in pieces for item in one]


def _encoded(fields: Piece, unusable: int = 0) -> Joined:
    return Joined(raw_map(codec.encode(fields)) or {}, unusable)


# -- maps ----------------------------------------------------------------------------------------


def _of_maps(items: list[Fields]) -> list[Joined]:
    if any("choices" in one for one in items):
        return _of_chunks([_plain(one) for one in items])
    if any("meta_info" in one for one in items):
        return _of_sglang([_plain(one) for one in items])
    by_index: dict[int, list[Fields]] = {}
    for one in items:
        parts = raw_items(one["outputs"]) if "outputs" in one else None
        for place, part in enumerate([one] if parts is None else map(raw_map, parts)):
            by_index.setdefault(place, []).append(part or {})
    return [_one_of(pieces) for _, pieces in sorted(by_index.items())]


def _one_of(items: list[Fields]) -> Joined:
    """Join maps that each hold a part of one generation, or everything so far."""
    pieces = [_plain(one) for one in items]
    texts = _named(pieces, OUTPUT_TEXT_NAMES, str)
    names = _named(pieces, OUTPUT_NAMES, list, 2 if texts else 1) or texts
    if names is None:
        return _encoded(_merged(pieces))
    name, kind = names
    parts = [one[name] for one in pieces if isinstance(one.get(name), kind)]
    kept = whole(parts, _CERTAIN_IDS if kind is list else _CERTAIN_CHARS)
    if kept is None:
        rest = [{key: one[key] for key in one.keys() - _LISTS - _TEXTS} for one in pieces]
        return _encoded(_merged(rest), 1)
    if len(kept) == len([one for one in parts if len(one)]):
        return _encoded(_merged(pieces))
    found: Piece = {}
    for piece in pieces:  # each holds everything so far
        found |= {key: value for key, value in piece.items() if value not in (None, "", [])}
    return _encoded(found)


def _named(
    pieces: list[Piece], names: Sequence[str], kind: type, least: int = 1
) -> tuple[str, type] | None:
    """Return the first of `names` that holds something in so many pieces."""
    for name in names:
        given = [one for one in pieces if isinstance(one.get(name), kind) and one[name]]
        if len(given) >= least:
            return name, kind
    return None


def _merged(pieces: list[Piece]) -> Piece:
    known: Piece = {}
    for piece in pieces:
        merge(known, piece)
    return known


def _plain(fields: Fields) -> Piece:
    """Return a decoded map, its per-token lists as lists whatever form they had."""
    found: Piece = {}
    for name, value in fields.items():
        numbers = read_numbers(value) if name in _LISTS and is_list(value) else None
        found[name] = codec.decode(value) if numbers is None else list(numbers)
    return found


def _of_chunks(pieces: list[Piece]) -> list[Joined]:
    """Join chunks of an OpenAI-compatible server, each with a `delta` or a text for its choice."""
    choices: dict[int, Piece] = {}
    rest: Piece = {}
    for piece in pieces:
        for place, choice in enumerate(_maps(piece.pop("choices", None))):
            if "message" in choice:
                return []  # whole answers
            index = choice.get("index", place)
            index = index if type(index) is int else place
            choices[index] = merge(choices.get(index, {}), choice)
        merge(rest, piece)
    found = (of_openai(one, rest, index, is_first=False) for index, one in sorted(choices.items()))
    usage = {name: rest[name] for name in ("usage",) if name in rest}
    return [_encoded(usage | one.outputs) for one in found]


def _of_sglang(pieces: list[Piece]) -> list[Joined]:
    known: dict[int, Piece] = {}
    for piece in pieces:
        index = piece.pop("index", 0)
        index = index if type(index) is int else 0
        known[index] = merge_sglang(known.get(index), piece)[0]
    return [_encoded(of_sglang(one).outputs) for _, one in sorted(known.items())]


def _maps(value: Any) -> list[Piece]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
