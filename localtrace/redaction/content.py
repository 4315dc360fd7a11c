"""One trajectory in the form in which it is redacted: columns by name, as plain values.

A `Trajectory` of the reader and rows of the tables are both taken apart into it, and put together
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

from localtrace.errors import StoreError
from localtrace.redaction.ids import REASON, without_ids
from localtrace.redaction.matches import mark
from localtrace.redaction.redactor import Redactor
from localtrace.redaction.tokens import Parts
from localtrace.types import Trajectory
from localtrace.values.codec import parse_json, to_json
from localtrace.values.placeholder import Placeholder

Row: TypeAlias = dict[str, Any]
"""One row of a table, or columns of it, by name."""
Rows: TypeAlias = tuple[list[Row], list[Row], list[Row]]
"""Rows of the tables `trajectories`, `spans` and `outcomes`."""

_HEAD = ("sample_index", "group_id", "name", "agent", "data_source", "error", "reward",
         "attributes")  # fmt: skip
_OUTCOME = ("name", "number", "text", "values", "source")
_LISTS = ("prompt_ids", "messages", "output_ids", "output_logprobs", "response_mask")
_SPAN = (*_LISTS, "op", "error", "prompt_text", "output_text", "output_message", "finish_reason",
         "inputs", "outputs")  # fmt: skip
_SPAN_ROW = (*_SPAN, "weight_version", "sample_index")
_ANY = frozenset({"attributes", "inputs", "outputs", "values"})
"""Columns that may hold anything."""
_JSON = frozenset({"attributes", "inputs", "outputs", "messages", "output_message"})
_NEVER_LEFT_OUT = frozenset({"attributes", "inputs", "outputs", "op"})
"""Columns whose fields may be left out, but which are there themselves."""
_IDENTITIES = frozenset({"group_id", "sample_index"})
"""Columns whose equal values belong together."""


@dataclass(slots=True)
class Content:
    """The parts of one trajectory that may have to be redacted."""

    heads: list[Row]
    calls: list[Row]
    outcomes: list[Row]
    prompts: list[list[int]]
    """The whole prompt of each call; the column of a row holds only what the turn added."""

    def copy(self) -> Content:
        """Return a copy to be edited."""
        heads, calls, outcomes = (
            [{**row} for row in rows] for rows in (self.heads, self.calls, self.outcomes)
        )
        return Content(heads, calls, outcomes, self.prompts)

    def edit(self, redactor: Redactor) -> None:
        """Redact it in place."""
        for outcome in self.outcomes:
            left_out = mark(outcome["name"])
            if redactor.leaves_out(outcome["name"], outcome) and outcome["text"] != left_out:
                redactor.count(outcome["name"])
                outcome.update(number=None, text=left_out, values=None)
            for name, value in outcome.items():
                outcome[name] = _fitting(name, redactor.value(value))
        for columns in (*self.heads, *self.calls):
            for name, value in columns.items():
                columns[name] = _edited(redactor, name, value)

    def leave_out_ids(self) -> bool:
        """Drop all lists that may be token ids; return whether there were any."""
        had_any = False
        for columns in self._columns():
            for name, value in columns.items():
                edited = None if name in ("prompt_ids", "output_ids") else without_ids(value, [])
                had_any |= edited is not value
                columns[name] = _fitting(name, edited)
        return had_any

    def id_lists(self) -> Iterator[Parts]:
        """Yield all lists that may be token ids, each once: turns first, in their order."""
        searched: set[tuple[int, ...]] = set()
        for prompt, call in zip(self.prompts, self.calls, strict=True):
            turn = [prompt, call["output_ids"] or []]
            searched.update(map(tuple, turn))
            yield turn
        others: list[Parts] = []
        for columns in self._columns():
            for name in _ANY.intersection(columns):
                without_ids(columns[name], others)
        for rows in others:
            ids = tuple(chain.from_iterable(rows))
            if ids not in searched:
                searched.add(ids)
                yield rows

    def _columns(self) -> Iterator[Row]:
        yield from (*self.heads, *self.calls, *self.outcomes)


def _edited(redactor: Redactor, name: str, value: Any) -> Any:
    if name in _NEVER_LEFT_OUT:
        return redactor.value(value)
    if name in _IDENTITIES and type(value) is str and not redactor.leaves_out(name, value):
        return redactor.identity(value)
    return _fitting(name, redactor.field(name, value))


def _fitting(name: str, value: Any) -> Any:
    """Return a value, or None where a column cannot hold the placeholder that it is."""
    return None if isinstance(value, Placeholder) and name not in _NEVER_LEFT_OUT else value


# -- records ------------------------------------------------------------------------------------


def of_trajectory(trajectory: Trajectory) -> Content:
    """Take apart a trajectory of the reader."""
    spans = (*trajectory.spans, *trajectory.generations)
    return Content(
        [_picked(trajectory, (*_HEAD, "model"), getattr)],
        [_picked(span, _SPAN, getattr) for span in spans],
        [_picked(outcome, _OUTCOME, getattr) for outcome in trajectory.outcomes],
        [span.prompt_ids or [] for span in spans],
    )


def onto_trajectory(trajectory: Trajectory, content: Content) -> Trajectory:
    """Return a copy of the trajectory with this content."""
    spans = [
        # Without ids, a mask tells nothing, as when it is read from rows.
        replace(span, **call | ({"response_mask": None} if call["output_ids"] is None else {}))
        for span, call in zip(
            (*trajectory.spans, *trajectory.generations), content.calls, strict=True
        )
    ]
    outcomes = [
        replace(outcome, **edited)
        for outcome, edited in zip(trajectory.outcomes, content.outcomes, strict=True)
    ]
    count = len(trajectory.spans)
    return replace(
        trajectory,
        **content.heads[0],
        spans=spans[:count],
        generations=spans[count:],
        outcomes=outcomes,
    )


def _picked(record: Any, names: tuple[str, ...], get: Callable[[Any, str], Any]) -> Row:
    return {name: get(record, name) for name in names}


# -- rows ---------------------------------------------------------------------------------------


def of_rows(
    rows: Rows,
    prompts: Mapping[str, list[int] | None],
    text_of: Callable[[list[int]], str | None],
) -> Content:
    """Take the rows of one trajectory apart.

    Args:
        rows: the rows of each table.
        prompts: the whole prompts by span id, where they can be rebuilt.
        text_of: decodes the ids of rows that lack their text; the ids may be left out, and nobody
            could read them then.
    """
    heads, spans, outcomes = rows
    calls = [_picked(row, _SPAN_ROW, _read) for row in spans]
    for call in calls:
        for text, ids in (("prompt_text", "prompt_ids"), ("output_text", "output_ids")):
            if call[text] is None and call[ids]:
                call[text] = text_of(call[ids])
    return Content(
        [_picked(row, _HEAD, _read) for row in heads],
        calls,
        [_picked(row, _OUTCOME, _read) for row in outcomes],
        # If a prompt cannot be rebuilt, search at least what the turn added to it.
        [prompts.get(row["span_id"]) or row["prompt_ids"] or [] for row in spans],
    )


def onto_rows(rows: Rows, content: Content, edited: Content) -> Rows:
    """Return copies of the rows with the edited content."""
    heads, spans, outcomes = rows
    new_spans = []
    for row, new in zip(spans, _written(spans, content.calls, edited.calls), strict=True):
        if any(new[name] is None and row[name] is not None for name in _LISTS):
            new["placeholder"] = REASON
        if new["output_logprobs"] is None:
            new["logprobs_rest"] = None
        # The checksums no longer hold: these lists were edited, or continue an edited one.
        new_spans.append(new | {"prompt_crc32": None, "messages_crc32": None})
    # A short text can be guessed from its hash.
    new_heads = [
        new | {"prompt_hash": None} for new in _written(heads, content.heads, edited.heads)
    ]
    return new_heads, new_spans, [*_written(outcomes, content.outcomes, edited.outcomes)]


def _written(rows: list[Row], content: list[Row], edited: list[Row]) -> Iterator[Row]:
    for row, before, after in zip(rows, content, edited, strict=True):
        texts = {
            name: row[name] if value is before[name] else None if value is None else to_json(value)
            for name, value in after.items()
            if name in _JSON
        }
        yield row | after | texts


def _read(row: Row, name: str) -> Any:
    if name not in _JSON or row[name] is None:
        return row[name]
    try:
        return parse_json(row[name])
    except ValueError as error:
        raise StoreError(
            f"trajectory {row['trace_id']} holds a text that cannot be read, so it cannot be "
            f"searched for keys ({error}): leave that trajectory out"
        ) from None
