"""The generations in an engine's answer, sent whole or joined from the pieces of a stream."""

from __future__ import annotations

from typing import Any

from localtrace.store.journal.choices import Generation, of_openai, of_sglang
from localtrace.store.journal.pieces import merge, merge_sglang
from localtrace.trainer_hooks.http.prompts import GENERATIONS_MAX
from localtrace.values.plain_json import decode_json


class Answer:
    """One answer: its generations and its other fields."""

    def __init__(self) -> None:
        self.size_bytes = 0
        """Size of the JSON text that is kept."""
        self.unreadable = 0
        """Number of pieces that could not be read as an engine's answer."""
        self.is_done = False
        """Whether the server sent `[DONE]`."""
        self.rest: dict[str, Any] = {}
        """Every field but the generations."""
        self._choices: dict[int, dict[str, Any]] = {}
        self._sizes: dict[int, int] = {}
        self._is_openai = False

    def add(self, text: bytes) -> None:
        """Add one event of a stream, or a whole body."""
        if text.strip() == b"[DONE]":
            self.is_done = True
            return
        try:
            piece = decode_json(text)
            items = piece if isinstance(piece, list) else [piece]
            for position, item in enumerate(items):
                self._add(item, position, len(text) // len(items))
        except (ValueError, TypeError, RecursionError):
            self.unreadable += 1

    @property
    def is_empty(self) -> bool:
        """Whether nothing readable has arrived."""
        return not self.rest and not self._choices and not self.is_done

    def generations(self) -> dict[int, Generation]:
        """Return the generations by index in the answer."""
        found = sorted(self._choices.items())
        if not self._is_openai:
            return {index: of_sglang(choice) for index, choice in found}
        return {
            index: of_openai(choice, self.rest, index, is_first=choice is found[0][1])
            for index, choice in found
        }

    def _add(self, piece: Any, position: int, size_bytes: int) -> None:
        if not isinstance(piece, dict):
            raise TypeError("no answer of an engine")
        choices = piece.pop("choices", None)
        if isinstance(choices, list):
            self._is_openai = True
            for number, choice in enumerate(choices):
                if isinstance(choice, dict):
                    index = _index(choice, number)
                    self._choices[index] = merge(self._choices.get(index, {}), choice)
        elif not piece.keys().isdisjoint(("meta_info", "output_ids", "text")):
            index = _index(piece, position)
            before = self._sizes.get(index, 0)
            self._choices[index], is_whole = merge_sglang(self._choices.get(index), piece)
            self._sizes[index] = size_bytes if is_whole else before + size_bytes
            self.size_bytes += self._sizes[index] - before
            return
        merge(self.rest, piece)
        self.size_bytes += size_bytes


def _index(fields: dict[str, Any], position: int) -> int:
    index = fields.pop("index", position)
    index = index if type(index) is int else position
    if not 0 <= index < GENERATIONS_MAX:
        raise ValueError("no engine answers so much at once")
    return index
