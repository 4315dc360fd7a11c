"""One trajectory in the form in which it is redacted.

A `Trajectory` of the reader and rows of the tables are both taken apart into it, and put together
again. Lists of ids, messages and log-probabilities stand beside the arguments and results that held
them, as in the tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

from localtrace.errors import StoreError
from localtrace.redaction.ids import (
    IDS,
    REASON,
    holds_ids,
    id_lists,
    other_id_lists,
    without_ids,
)
from localtrace.redaction.tokens import Sequence
from localtrace.redaction.values import Editor, Held
from localtrace.store.tokenizers import Decode
from localtrace.types import Span, Trajectory
from localtrace.values.codec import parse_json, to_json

Row: TypeAlias = dict[str, Any]
"""One row of a table, by column name."""

_HEAD_COLUMNS = ("sample_index", "group_id", "name", "agent", "data_source", "error", "reward")
_OUTCOME_COLUMNS = ("name", "number", "text", "values", "source")
_SPAN_LISTS = ("prompt_ids", "messages", "output_ids", "output_logprobs", "response_mask")
_SPAN_COLUMNS = (*_SPAN_LISTS, "op", "error", "output_text", "output_message", "finish_reason")
_COLUMNS_OF_JSON = {"messages": list, "output_message": dict}
_ROW_COLUMNS = (*_SPAN_COLUMNS, "prompt_text", "weight_version", "sample_index")


@dataclass(slots=True)
class Call:
    """One call: its columns, and its other arguments and results."""

    seq: int
    prompt: list[int]
    """The whole prompt; the column of a row holds only what the turn added."""
    columns: Row
    inputs: Any
    outputs: Any

    def edit(self, editor: Editor) -> None:
        """Redact it in place."""
        for name, value in self.columns.items():
            if name == "messages":
                self.columns[name] = editor.messages(name, value)
            elif name == "output_message":
                self.columns[name] = editor.value(editor.column(name, value))
            else:
                # A field of this name may be left out, but a call without its op is no call.
                self.columns[name] = editor.column("" if name == "op" else name, value)
        self.inputs, self.outputs = editor.value(self.inputs), editor.value(self.outputs)

    def leave_out_ids(self) -> bool:
        """Drop all lists that may be token ids; return whether there were any."""
        columns, inputs, outputs = self.columns, self.inputs, self.outputs
        messages = columns["messages"]
        if messages is not None:
            messages = [without_ids(message) for message in messages]
        self.inputs, self.outputs = without_ids(inputs), without_ids(outputs)
        self.columns = {
            **columns,
            "messages": messages,
            "output_message": without_ids(columns["output_message"]),
            "prompt_ids": None,
            "output_ids": None,
        }
        return (
            bool(columns["prompt_ids"] or columns["output_ids"])
            or self.inputs is not inputs
            or self.outputs is not outputs
        )

    def sequences(self) -> Iterator[Sequence]:
        """Yield its token ids, each prompt with what was generated after it."""
        yield [self.prompt, self.columns["output_ids"] or []]
        for value in (self.inputs, self.outputs):
            yield [*id_lists(value)]


@dataclass(slots=True)
class Content:
    """The parts of one trajectory that may have to be redacted."""

    run_id: str
    heads: list[Row]
    """Columns of the trajectory, its attributes decoded."""
    calls: list[Call]
    outcomes: list[Row]

    def edit(self, editor: Editor) -> None:
        """Redact it in place."""
        for head in self.heads:
            for name, value in head.items():
                head[name] = (
                    editor.value(value) if name == "attributes" else editor.column(name, value)
                )
        for call in self.calls:
            call.edit(editor)
        self.outcomes = [editor.outcome(outcome) for outcome in self.outcomes]

    def leave_out_ids(self) -> bool:
        """Drop all lists that may be token ids; return whether there were any."""
        gone = [call.leave_out_ids() for call in self.calls]
        for head in self.heads:
            attributes = without_ids(head["attributes"])
            gone.append(attributes is not head["attributes"])
            head["attributes"] = attributes
        for outcome in self.outcomes:
            if holds_ids(outcome["values"] or []):
                gone.append(True)
                outcome["values"] = None
        return any(gone)

    def sequences(self) -> Iterator[Sequence]:
        """Yield the token ids of its calls, in the order in which they began."""
        for call in sorted(self.calls, key=lambda call: call.seq):
            yield from call.sequences()

    def other_sequences(self) -> Iterator[Sequence]:
        """Yield the lists under any other name that may be token ids."""
        values = [value for call in self.calls for value in (call.inputs, call.outputs)]
        values += [head["attributes"] for head in self.heads]
        values += [outcome["values"] for outcome in self.outcomes]
        known: defaultdict[int, list[list[int]]] = defaultdict(list)
        for ids in (ids for sequence in self.sequences() for ids in sequence):
            known[len(ids)].append(ids)
        for value in values:
            for rows in other_id_lists(value):
                ids = [*chain.from_iterable(rows)]
                if ids not in known[len(ids)]:
                    known[len(ids)].append(ids)
                    yield rows


# -- records ------------------------------------------------------------------------------------


def of_trajectory(trajectory: Trajectory) -> Content:
    """Take apart a trajectory of the reader."""
    return Content(
        trajectory.run_id,
        [_fields(trajectory, (*_HEAD_COLUMNS, "attributes"))],
        [_of_span(span) for span in (*trajectory.spans, *trajectory.generations)],
        [_fields(outcome, _OUTCOME_COLUMNS) for outcome in trajectory.outcomes],
    )


def onto_trajectory(trajectory: Trajectory, content: Content) -> Trajectory:
    """Return a copy of the trajectory with this content."""
    (head,) = content.heads
    spans = [
        replace(
            span,
            **_without_lone_mask(call.columns),
            inputs=_put_back(call.inputs, call.columns),
            outputs=_put_back(call.outputs, call.columns),
        )
        for span, call in zip(
            (*trajectory.spans, *trajectory.generations), content.calls, strict=True
        )
    ]
    calls = len(trajectory.spans)
    outcomes = [
        replace(outcome, **edited)
        for outcome, edited in zip(trajectory.outcomes, content.outcomes, strict=True)
    ]
    return replace(
        trajectory, **head, spans=spans[:calls], generations=spans[calls:], outcomes=outcomes
    )


def _without_lone_mask(columns: Row) -> Row:
    """Return a span's columns; without ids, a mask tells nothing, as when it is read from rows."""
    return columns | ({"response_mask": None} if columns["output_ids"] is None else {})


def _fields(record: Any, names: tuple[str, ...]) -> Row:
    return {name: getattr(record, name) for name in names}


def _of_span(span: Span) -> Call:
    columns = _fields(span, _SPAN_COLUMNS)
    held = {id(columns[name]): Held(name) for name in _SPAN_LISTS if columns[name] is not None}
    inputs, outputs = (
        {name: held.get(id(part), part) for name, part in value.items()}
        if isinstance(value, dict)
        else value
        for value in (span.inputs, span.outputs)
    )
    return Call(span.seq, span.prompt_ids or [], columns, inputs, outputs)


def _put_back(value: Any, columns: Row) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _held(part, columns) for name, part in value.items()}


def _held(part: Any, columns: Row) -> Any:
    if not isinstance(part, Held):
        return part
    value = columns[part.column]
    return IDS if value is None else value


# -- rows ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class TraceRows:
    """The rows of one trajectory in each table."""

    trajectories: list[Row]
    spans: list[Row]
    outcomes: list[Row]
    _texts: dict[int, tuple[Any, str]] = field(default_factory=dict)
    """Values read from JSON, with their texts, by `id`: an unchanged value keeps its text."""

    def content(self, prompts: Mapping[str, list[int] | None], decode: Decode) -> Content:
        """Take the rows apart.

        Args:
            prompts: the whole prompts by span id, where they can be rebuilt.
            decode: decodes the ids of rows that lack their text; the ids may be left out, and
                nobody could read them then.
        """
        return Content(
            next(row["run_id"] for row in (*self.trajectories, *self.spans, *self.outcomes)),
            [
                _picked(row, _HEAD_COLUMNS) | {"attributes": self._read(row["attributes"])}
                for row in self.trajectories
            ],
            [self._call(row, prompts, decode) for row in self.spans],
            [_picked(row, _OUTCOME_COLUMNS) for row in self.outcomes],
        )

    def edited(self, content: Content) -> tuple[list[Row], list[Row], list[Row]]:
        """Return copies of the rows with this content."""
        return (
            [
                row
                | head
                | {"attributes": self._written(row["attributes"], head["attributes"])}
                | {"prompt_hash": None}  # a short text can be guessed from its hash
                for row, head in zip(self.trajectories, content.heads, strict=True)
            ],
            [self._row(row, call) for row, call in zip(self.spans, content.calls, strict=True)],
            [row | edited for row, edited in zip(self.outcomes, content.outcomes, strict=True)],
        )

    def _call(self, row: Row, prompts: Mapping[str, list[int] | None], decode: Decode) -> Call:
        columns = _picked(row, _ROW_COLUMNS)
        for text, ids in (("prompt_text", "prompt_ids"), ("output_text", "output_ids")):
            if row[text] is None and row[ids]:
                columns[text] = decode(row["run_id"], row[ids])
        for name, kind in _COLUMNS_OF_JSON.items():
            columns[name] = self._read(row[name], kind)
        # If a prompt cannot be rebuilt, search at least what the turn added to it.
        prompt = prompts.get(row["span_id"]) or row["prompt_ids"] or []
        inputs, outputs = self._read(row["inputs"]), self._read(row["outputs"])
        return Call(row["seq"], prompt, columns, inputs, outputs)

    def _row(self, row: Row, call: Call) -> Row:
        new = row | call.columns
        for name, value in (
            ("inputs", call.inputs),
            ("outputs", call.outputs),
            *((name, call.columns[name]) for name in _COLUMNS_OF_JSON),
        ):
            new[name] = self._written(row[name], value)
        if any(new[name] is None and row[name] is not None for name in _SPAN_LISTS):
            new["placeholder"] = REASON
        if new["output_logprobs"] is None:
            new["logprobs_rest"] = None
        # The checksums no longer hold: these lists were edited, or continue an edited one.
        return new | {"prompt_crc32": None, "messages_crc32": None}

    def _read(self, text: str | None, kind: type = object) -> Any:
        if text is None:
            return None
        try:
            value = parse_json(text)
            if not isinstance(value, kind):
                raise ValueError(f"no {kind.__name__}")
        except ValueError as error:
            trace_id = next(row["trace_id"] for row in (*self.trajectories, *self.spans))
            raise StoreError(
                f"trajectory {trace_id} holds a text that cannot be read, so it cannot be searched "
                f"for keys ({error}): leave that trajectory out"
            ) from None
        self._texts[id(value)] = (value, text)
        return value

    def _written(self, before: str | None, value: Any) -> str | None:
        if value is None:
            return before if before == "null" else None
        _, text = self._texts.get(id(value), (None, None))
        return to_json(value) if text is None else text


def _picked(row: Row, names: tuple[str, ...]) -> Row:
    return {name: row[name] for name in names}
