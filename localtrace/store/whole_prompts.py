"""Whole prompts and message lists from what each turn added.

A turn's list is the first `kept` elements of its base, followed by the new ones. For prompts the
base is the earlier turn's whole prompt and the ids that were generated after it; for messages it
is the earlier turn's whole list alone. This module knows nothing of files or SQL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from localtrace.store.journal.deltas import Chains
from localtrace.values.codec import encode, from_json
from localtrace.values.encoded import list_elements

_IDS_DECODER = msgspec.msgpack.Decoder(list[int])
_LIST_DECODER = msgspec.msgpack.Decoder(list[msgspec.Raw])
Row = Mapping[str, Any]
"""One row of the table `spans`, by column name."""


def whole_prompts(rows: Iterable[Row]) -> dict[str, list[int] | None]:
    """Rebuild the prompts of one trajectory.

    Args:
        rows: the spans of one trajectory, in any order; spans that are not turns are skipped.

    Returns:
        The prompt ids by span id; None where a base is missing or the checksum does not match.
    """
    turns = {row["span_id"]: row for row in rows if row["prompt_name"] is not None}
    prompts: dict[str, list[int] | None] = {}
    last: list[int] = []
    for span_id, data in _rebuilt(turns, "prompt").items():
        if data is None:
            prompts[span_id] = None
            continue
        ids = _IDS_DECODER.decode(data)
        # Prompts that begin alike share their numbers, each of which is an object of 28 bytes.
        shared = shared_prefix(last, ids)
        last = prompts[span_id] = last[:shared] + ids[shared:]
    return prompts


def whole_messages(rows: Iterable[Row]) -> dict[str, list[Any] | None]:
    """Rebuild the message lists of one trajectory; see `whole_prompts`.

    Messages that are equal are one object, so that they need to be looked at only once.
    """
    turns = {row["span_id"]: dict(row) for row in rows if row["messages_name"] is not None}
    known: dict[bytes, Any] = {}
    for row in turns.values():
        messages = None if row["messages"] is None else from_json(row["messages"])
        row["messages_ids"] = None
        if isinstance(messages, list):
            row["messages_ids"] = [msgspec.Raw(encode(message)) for message in messages]
            known |= zip(map(bytes, row["messages_ids"]), messages, strict=True)
    return {
        span_id: None
        if data is None
        else [known[bytes(message)] for message in _LIST_DECODER.decode(data)]
        for span_id, data in _rebuilt(turns, "messages").items()
    }


def _rebuilt(turns: Mapping[str, Row], kind: str) -> dict[str, bytes | None]:
    """Return the whole lists of turns, encoded.

    Args:
        turns: the rows by span id; `<kind>_ids` holds what each adds.
        kind: the beginning of the names of columns.
    """
    chains = Chains()
    waiting = dict(turns)
    for start in turns:
        chain: list[Row] = []
        span_id: str | None = start
        while span_id in waiting:  # a circular chain ends where it began
            chain.append(waiting.pop(span_id))
            span_id = chain[-1][f"{kind}_base"]
        for row in reversed(chain):
            chains.add(
                row["span_id"],
                row[f"{kind}_base"],
                row[f"{kind}_kept"] or 0,
                _elements(row[f"{kind}_ids"]),
                _elements(row["output_ids"] or []) if kind == "prompt" else None,
                row[f"{kind}_crc32"],
            )
    return {span_id: chains.whole(span_id) for span_id in turns}


def _elements(items: list[Any] | None) -> tuple[int, bytes] | None:
    return None if items is None else list_elements(msgspec.msgpack.encode(items))


def shared_prefix(left: list[Any], right: list[Any]) -> int:
    """Return how many leading elements two lists have in common."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class SeenLists:
    """Lists of earlier turns. Of those that a later one continues, only the later one is kept."""

    def __init__(self) -> None:
        self._lists: list[list[Any]] = []
        self._continued: list[int] = []
        """Places of lists that the list asked about continues."""

    def known(self, elements: list[Any]) -> int:
        """Return how many leading elements of a list an earlier one has too."""
        longest = 0
        self._continued = []
        for place in reversed(range(len(self._lists))):
            earlier = self._lists[place]
            if len(earlier) > longest:
                shared = shared_prefix(elements, earlier)
                longest = max(longest, shared)
                if shared == len(earlier):
                    self._continued.append(place)
        return longest

    def add(self, elements: list[Any]) -> None:
        """Remember the list that was asked about last, with what follows it."""
        for place in self._continued:
            del self._lists[place]
        self._lists.append(elements)
