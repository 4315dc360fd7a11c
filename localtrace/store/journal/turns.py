"""Turns: which calls are model generations, and how many each of them made.

The writer thread counts turns by these functions and the sealer marks rows by them, both on encoded
bytes, so `turn_count` and `is_turn` agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from localtrace.field_names import (
    DROPPED_NAMES,
    LOGPROB_NAMES,
    MASK_NAMES,
    OUTPUT_NAMES,
    PROMPT_NAMES,
)
from localtrace.store.journal.prompts import batched_prompts, has_prompt, prompt_hash
from localtrace.store.journal.records import Call, SpanCall, TurnCall
from localtrace.store.journal.results import (
    GENERATIONS_MAX,
    Fields,
    finish_reason,
    has_ids,
    message_of,
    of_map,
    results,
    token_lists,
)
from localtrace.store.journal.streams import joined, yielded
from localtrace.values import codec
from localtrace.values.arrays import read_array
from localtrace.values.encoded import first_named, is_list_of_lists, raw_items, raw_map
from localtrace.values.token_lists import read_ids

_LISTS = frozenset({*OUTPUT_NAMES, *LOGPROB_NAMES})


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of a call."""

    outputs: Fields
    """Its fields of the result."""
    prompt: Fields | None = None
    """Its own prompt, where the call took several, empty if unknown; None: the call's prompt."""
    index: int | None = None
    """Place among the generations of the call; None where the call itself is the generation."""
    unusable: int = 0
    """Lists and texts that are missing in its fields because they could not be used."""


def generations(call: Call, inputs: Fields, outputs: Fields | None) -> list[Generation]:
    """Return the generations that a call made, in order; none where it was not a turn.

    A call is a turn if its result holds generated ids or a finish reason. If it was given a prompt,
    text, reasoning or tool calls in its result are enough. A call with a list of prompts, or whose
    result holds several choices, is as many turns. A bare text or list counts only if the recording
    code says that the call is a generation. What a generator yielded are pieces of one generation.

    Args:
        call: any call; only a `TurnCall` can be a turn.
        inputs: its arguments; those that became deltas may be missing.
        outputs: the fields of its result; None where it has none.
    """
    if not isinstance(call, TurnCall) or not call.turns:
        return []
    return _turns_of(call, inputs, outputs)


def _may_be_turn(call: TurnCall) -> bool:
    return not call.detail and call.kind in (None, "generation")


def _turns_of(call: TurnCall, inputs: Fields, fields: Fields | None) -> list[Generation]:
    made = _made(call, inputs, fields)
    name = first_named(fields, OUTPUT_NAMES)
    value = call.outputs if fields is None else fields[name] if name else None
    if not made or value is None or read_array(value) is None or not is_list_of_lists(value):
        return made
    if not all(_repeats_prompt(one, inputs) for one in made):
        return made
    # As of `generate` of transformers: where the answers begin and end is not known.
    return [
        replace(one, outputs={k: v for k, v in one.outputs.items() if k not in _LISTS}, unusable=1)
        for one in made
    ]


def _repeats_prompt(one: Generation, inputs: Fields) -> bool:
    """Tell whether ids begin with the whole prompt, and no mask says which were generated."""
    prompt = inputs if one.prompt is None else one.prompt
    names = first_named(prompt, PROMPT_NAMES), first_named(one.outputs, OUTPUT_NAMES)
    if names[0] is None or names[1] is None or first_named(one.outputs, MASK_NAMES) is not None:
        return False
    if one.prompt is None and read_array(prompt[names[0]]) is None:
        return False  # a list, which the sealer finds among the deltas
    given, ids = read_ids(prompt[names[0]]), read_ids(one.outputs[names[1]])
    if given is None or ids is None or not len(given.values):
        return False
    return list(ids.values[: len(given.values)]) == list(given.values)


def _made(call: TurnCall, inputs: Fields, fields: Fields | None) -> list[Generation]:
    is_said = call.kind == "generation"
    prompts, outputs = batched_prompts(inputs), call.outputs
    if call.is_stream:
        outputs, fields = yielded(outputs), None
        if not (prompts and len(prompts) > 1) and not _are_whole(outputs):
            is_given = is_said or _has_prompt(call, inputs)
            return _streamed(call, prompts) if is_given else []
    found = results(outputs) if fields is None else of_map(fields)
    if fields is None and (is_said or (call.is_stream and prompts is not None)):
        found = _bare(outputs) or found
    is_alone = prompts is None and (fields is not None or (is_said and len(found) == 1))
    if is_alone and len(found) == 1:
        counts = _says_so(found[0]) or (
            (is_said or _has_prompt(call, inputs)) and not message_of(found[0]).is_empty
        )
        return [Generation(found[0])] if counts else []
    if fields is None and prompts is None and not all(finish_reason(one) for one in found):
        return []  # they may be the pieces of a stream
    per_prompt, rest = divmod(len(found), len(prompts or found or (None,)))
    text_counts = is_said or (not rest and (prompts is not None or _has_prompt(call, inputs)))
    return [
        Generation(one, _own_prompt(prompts, index, per_prompt, rest), index)
        for index, one in enumerate(found)
        if _says_so(one) or (text_counts and not message_of(one).is_empty)
    ]


def _are_whole(outputs: msgspec.Raw) -> bool:
    """Tell whether a generator yielded several generations, of which each says why it stopped."""
    items = [raw_map(item) for item in raw_items(outputs) or ()]
    return len(items) > 1 and all(one and finish_reason(one) is not None for one in items)


def _streamed(call: TurnCall, prompts: list[Fields] | None) -> list[Generation]:
    """Return the generations whose pieces a generator yielded."""
    found = joined(call.outputs)
    is_alone = len(found) == 1 and prompts is None
    per_prompt, rest = divmod(len(found), len(prompts or found or (None,)))
    return [
        Generation(
            one.fields,
            _own_prompt(prompts, index, per_prompt, rest),
            None if is_alone else index,
            one.unusable,
        )
        for index, one in enumerate(found)
        if one.unusable or _says_so(one.fields) or not message_of(one.fields).is_empty
    ]


def _own_prompt(
    prompts: list[Fields] | None, index: int, per_prompt: int, rest: int
) -> Fields | None:
    """Return the prompt of a generation: the samples of one prompt follow one another.

    It is empty where the generations cannot be divided evenly among the prompts.
    """
    if prompts is None:
        return None
    return {} if rest else prompts[index // per_prompt]


def _has_prompt(call: Call, inputs: Fields) -> bool:
    return bool(call.deltas) or has_prompt(inputs)


def _says_so(fields: Fields) -> bool:
    """Tell whether these fields can only be those of a generation."""
    return has_ids(fields) or finish_reason(fields) is not None


def _bare(outputs: msgspec.Raw) -> list[Fields]:
    """Return the texts or lists of ids of a result without names, each as a field."""
    items = raw_items(outputs)
    if not items or isinstance(codec.decode(items[0]), int):
        return _bare_one(outputs)
    found = [_bare_one(item) for item in items[:GENERATIONS_MAX]]
    return [fields for one in found for fields in one] if all(found) else []


def _bare_one(value: msgspec.Raw) -> list[Fields]:
    ids = None if is_list_of_lists(value) else read_ids(value)
    if ids is not None and ids.is_exact:
        return [{"output_ids": value}]
    return [{"text": value}] if isinstance(codec.decode(value), str) else []


@dataclass(slots=True)
class TurnTotals:
    """The writer's running totals of the turns of an open trajectory."""

    turns: int = 0
    output_tokens: int | None = 0
    """None where there are turns and none of them lists its ids."""
    prompt_hash: bytes | None = None
    """Identity of the first turn's prompt."""
    unusable: int = 0
    """Per-token lists of turns that could not be used."""
    around: set[int] = field(default_factory=set)
    """Span ids of the calls that turns were made in."""

    def settle(self, call: TurnCall, inputs: Fields, outputs: Fields | None) -> list[Generation]:
        """Note in the record how many generations a call made, and whether turns are inside it.

        A call with turns inside is not a turn itself, unless its result lists generated ids.

        Args:
            call: the record, which is changed.
            inputs: its arguments, as they were before deltas.
            outputs: the fields of its result; None where it has none.
        """
        call.has_turns = call.span_id in self.around
        made = _turns_of(call, inputs, outputs) if _may_be_turn(call) else []
        if call.has_turns and not any(has_ids(one.outputs) for one in made):
            call.detail, made = True, []
        call.turns = len(made)
        return made

    def add(self, call: TurnCall, inputs: Fields, made: list[Generation]) -> None:
        """Count the generations of a call, as `settle` returned them."""
        self.pass_on(call)
        if not made:
            return
        if self.turns == 0:
            prompt = made[0].prompt
            beside = {name: inputs[name] for name in DROPPED_NAMES.intersection(inputs)}
            self.prompt_hash = prompt_hash(inputs if prompt is None else beside | prompt)
            call.prompt_hash = self.prompt_hash
        lists = [token_lists(one.outputs) for one in made]
        self.unusable += sum(one.unusable for one in lists) + sum(one.unusable for one in made)
        known = [one.generated for one in lists if one.generated is not None]
        if known:
            self.output_tokens = (self.output_tokens or 0) + sum(known)
        elif self.turns == 0:
            self.output_tokens = None
        self.turns += len(made)
        if call.parent_id is not None:
            self.around.add(call.parent_id)

    def pass_on(self, call: SpanCall | TurnCall) -> bool:
        """Mark a call that has turns inside it, and note that its caller has them too.

        Returns:
            Whether the call has turns inside it.
        """
        call.has_turns = call.span_id in self.around
        if call.has_turns and call.parent_id is not None:
            self.around.add(call.parent_id)
        return call.has_turns
