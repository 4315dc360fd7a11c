"""What must not leave: applied to trajectories on their way into a tracker or a bundle.

Patterns replace what they match in every text. Token ids spell text too: where a pattern matches
anything in a trajectory, the decoded tokens included, all its token ids are left out. This module
knows neither trackers nor bundles.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from localtrace.codec import from_json, to_json
from localtrace.placeholder import Placeholder
from localtrace.schema import OUTPUT_NAMES, PROMPT_NAMES
from localtrace.tokens import shared_prefix, whole_prompts
from localtrace.types import Span, Trajectory
from localtrace.uploader.redaction_rules import Rules, load_rules

Row: TypeAlias = dict[str, Any]
Decode: TypeAlias = Callable[[str, list[int]], str | None]
"""Turns a run's ids into text."""
Turn: TypeAlias = tuple[list[int], list[int]]
"""The whole prompt and the output of one generation."""

IDS_COUNT = "trajectories without their token ids"
"""The count of trajectories whose ids would have spelled what was redacted."""
_REASON = "redacted"
_IDS = Placeholder(_REASON, "list")
_ID_NAMES = frozenset({*PROMPT_NAMES, *OUTPUT_NAMES})
_IDS_AT_LEAST = 9
"""Lists of so many whole numbers are taken for ids, whatever their name."""
_WINDOW_IDS = 64
"""A key may begin so many tokens before what a turn adds."""
_BASES_TRIED = 4

_TRAJECTORY_TEXTS = ("name", "agent", "data_source", "error")
_SPAN_TEXTS = ("error", "prompt_text", "output_text", "finish_reason")
_SPAN_JSON = ("inputs", "outputs", "messages")


class Redaction:
    """The rules of one upload or bundle, and how often each was applied."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._matches = 0
        self.counts: Counter[str] = Counter()
        """By the name of a rule how often it replaced something."""

    @classmethod
    def load(cls, path: Path | None) -> Redaction:
        """The default rules, and those of a file; see `redaction_rules`.

        Raises:
            ConfigError: the file cannot be read, or a rule in it is wrong.
        """
        return cls(load_rules(path))

    @property
    def digest(self) -> str:
        """sha256 of the rules."""
        return hashlib.sha256(msgspec.json.encode(self._rules.parts())).hexdigest()

    def text(self, text: str) -> str:
        """A text with every match replaced."""
        for pattern in self._rules.patterns:
            text, count = pattern.regex.subn(lambda _, p=pattern: p.replacement, text)  # type: ignore[misc]
            if count:
                self.counts[pattern.name] += count
                self._matches += count
        return text

    def value(self, value: Any) -> Any:
        """A value with every match in its texts replaced; the same object where there is none."""
        kind = type(value)
        if kind is str:
            return self.text(value)
        if kind is dict:
            pairs = [(self.value(key), self._field(key, part)) for key, part in value.items()]
            same = all(
                key is before and part is value[before]
                for (key, part), before in zip(pairs, value, strict=True)
            )
            return value if same else dict(pairs)
        if kind in (list, tuple):
            if value and _all_numbers(value):
                return value
            parts = [self.value(part) for part in value]
            same = all(part is before for part, before in zip(parts, value, strict=True))
            return value if same else kind(parts)
        if kind is bytes and self._finds(value.decode("latin-1")):
            return Placeholder(_REASON, "bytes", len(value))
        return value

    def _field(self, name: Any, value: Any) -> Any:
        if name in self._rules.fields and value is not None:
            if isinstance(value, Placeholder) and value.reason == _REASON:
                return value
            self.counts[str(name)] += 1
            return Placeholder(_REASON, type(value).__name__)
        return self.value(value)

    def _finds(self, text: str) -> bool:
        found = [p.name for p in self._rules.patterns if p.regex.search(text)]
        self.counts.update(found)
        self._matches += len(found)
        return bool(found)

    def trajectory(self, trajectory: Trajectory, decode: Decode) -> Trajectory:
        """An edited copy of a trajectory, or the same object where nothing had to go."""
        matches, before = self._matches, self.counts.total()
        texts: dict[str, Any] = {
            name: self._optional(getattr(trajectory, name)) for name in _TRAJECTORY_TEXTS
        }
        edited = replace(
            trajectory,
            **texts,
            attributes=self.value(trajectory.attributes),
            spans=[self._span(span) for span in trajectory.spans],
            outcomes=[replace(o, text=self._optional(o.text)) for o in trajectory.outcomes],
        )
        turns = [
            (span.prompt_ids or [], span.output_ids or [])
            for span in trajectory.spans
            if span.prompt_ids or span.output_ids
        ]
        if turns and (self._matches > matches or self._spelled(trajectory.run_id, turns, decode)):
            self.counts[IDS_COUNT] += 1
            spans = [
                replace(
                    span,
                    inputs=_without_ids(span.inputs),
                    outputs=_without_ids(span.outputs),
                    prompt_ids=None,
                    output_ids=None,
                )
                for span in edited.spans
            ]
            return replace(edited, attributes=_without_ids(edited.attributes), spans=spans)
        return trajectory if self.counts.total() == before else edited

    def _span(self, span: Span) -> Span:
        inputs, messages = self.value(span.inputs), span.messages
        if isinstance(span.inputs, dict) and messages is not None:
            # The list stands among the arguments too, and is counted once.
            same = [name for name, value in span.inputs.items() if value is messages]
            edited = inputs.get(same[0]) if same else self.value(messages)
            messages = edited if isinstance(edited, list) else None
        return replace(
            span,
            error=self._optional(span.error),
            inputs=inputs,
            outputs=self.value(span.outputs),
            messages=messages,
            output_text=self._optional(span.output_text),
            finish_reason=self._optional(span.finish_reason),
        )

    def _optional(self, text: str | None) -> str | None:
        return None if text is None else self.text(text)

    def _spelled(self, run_id: str, turns: Sequence[Turn], decode: Decode) -> bool:
        """Whether the tokens spell a match; looks at what each turn adds, and a little before."""
        before: list[list[int]] = []
        for prompt, output in turns:
            whole = [*prompt, *output]
            known = max((shared_prefix(base, whole) for base in before[-_BASES_TRIED:]), default=0)
            text = decode(run_id, whole[max(0, known - _WINDOW_IDS) :])
            if text is not None and any(p.regex.search(text) for p in self._rules.patterns):
                return True
            before.append(whole)
        return False

    def rows(
        self,
        trajectories: Iterable[Row],
        spans: Iterable[Row],
        outcomes: Iterable[Row],
        decode: Decode,
    ) -> tuple[list[Row], list[Row], list[Row]]:
        """The same for rows of the tables; rows of a trajectory must come together in one call."""
        touched: set[str] = set()
        edited = [
            [self._row(row, texts, documents, touched) for row in rows]
            for rows, texts, documents in (
                (trajectories, _TRAJECTORY_TEXTS, ("attributes",)),
                (spans, _SPAN_TEXTS, _SPAN_JSON),
                (outcomes, ("text",), ()),
            )
        ]
        of_trace: dict[str, list[Row]] = defaultdict(list)
        for row in edited[1]:
            of_trace[row["trace_id"]].append(row)
        spelled = {
            trace_id
            for trace_id, rows in of_trace.items()
            if any(row["prompt_ids"] or row["output_ids"] for row in rows)
            and (trace_id in touched or self._spelled(rows[0]["run_id"], _turns(rows), decode))
        }
        self.counts[IDS_COUNT] += len(spelled)
        return (
            [_no_ids(row, ("attributes",), spelled) for row in edited[0]],
            [_unchecked(_no_ids(row, _SPAN_JSON, spelled), touched | spelled) for row in edited[1]],
            edited[2],
        )

    def _row(
        self, row: Row, texts: Iterable[str], documents: Iterable[str], touched: set[str]
    ) -> Row:
        matches = self._matches
        new = {name: self._optional(row[name]) for name in texts}
        for name in documents:
            new[name] = row[name]
            if row[name] is not None:
                value = from_json(row[name])
                safe = self.value(value)
                if safe is not value:
                    new[name] = to_json(safe)
                    if name == "messages":
                        new["messages_crc32"] = None
        if self._matches > matches:
            touched.add(row["trace_id"])
        return {**row, **new}


def _all_numbers(values: Sequence[Any]) -> bool:
    return set(map(type, values)) <= {int, float}


def _turns(rows: list[Row]) -> list[Turn]:
    prompts = whole_prompts(rows)
    # Where a prompt cannot be rebuilt, what the turn added can still be read.
    return [
        (prompts.get(row["span_id"]) or row["prompt_ids"] or [], row["output_ids"] or [])
        for row in sorted(rows, key=lambda row: row["seq"])
    ]


def _no_ids(row: Row, documents: Iterable[str], spelled: set[str]) -> Row:
    if row["trace_id"] not in spelled:
        return row
    new: Row = {}
    for name in documents:
        if row[name] is not None:
            new[name] = to_json(_without_ids(from_json(row[name])))
    if "prompt_ids" in row:
        new |= {"prompt_ids": None, "output_ids": None, "placeholder": _REASON}
    return {**row, **new}


def _unchecked(row: Row, touched: set[str]) -> Row:
    """Checksums of lists that were edited, or that continue an edited one, no longer match."""
    if row["trace_id"] not in touched:
        return row
    return {**row, "prompt_crc32": None, "messages_crc32": None}


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        if value.get("$type") == "array":  # as it stands where numpy is not installed
            return _IDS
        return {
            key: _IDS if key in _ID_NAMES and _are_ids(part, 1) else _without_ids(part)
            for key, part in value.items()
        }
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return _IDS if value.dtype.kind in "iu" and value.size >= _IDS_AT_LEAST else value
    if isinstance(value, list | tuple):
        if _are_ids(value, _IDS_AT_LEAST) and max(value) > 1:  # of ones and zeros: a mask
            return _IDS
        return type(value)(map(_without_ids, value))
    return value


def _are_ids(value: Any, at_least: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) >= at_least
        and all(type(one) is int and one >= 0 for one in value)
    )
