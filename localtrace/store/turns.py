"""What makes a call a turn, and what identifies a prompt.

The writer thread counts turns by these functions and the sealer marks rows by them, both on encoded
bytes, so `turn_count` and `is_turn` agree.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localtrace import codec
from localtrace.arrays import EXT
from localtrace.schema import (
    DETAIL_NAMES,
    DROPPED_NAMES,
    FINISH_NAMES,
    MASK_NAMES,
    MESSAGE_NAMES,
    OUTPUT_NAMES,
    OUTPUT_TEXT_NAMES,
    PROMPT_NAMES,
    PROMPT_TEXT_NAMES,
)
from localtrace.store.encoded import (
    first_named,
    is_list,
    list_bytes,
    list_elements,
    listed_elements,
    raw_map,
)
from localtrace.store.records import Call, SpanCall, TurnCall

Fields = dict[str, msgspec.Raw]
"""Arguments or a result by name, still encoded."""
_HASH_BYTES = 16
_NOTHING = (b"\xc0", b"\x80", b"\x90")
"""Nil, and an empty map or list."""


def with_details(fields: Fields) -> Fields:
    """The fields of a result, with what engines and trainers put one level deeper."""
    found: Fields = {}
    for name in DETAIL_NAMES:
        if name in fields:
            found |= raw_map(fields[name]) or {}
    return found | fields


def named_value(fields: Fields, names: tuple[str, ...]) -> Any:
    """The first of `names` that is a field, decoded; None where none is."""
    name = first_named(fields, names)
    return None if name is None else codec.decode(fields[name])


def output_elements(outputs: Fields | None) -> tuple[int, bytes] | None:
    """Count and bytes of the ids that a result says were generated."""
    name = first_named(outputs, OUTPUT_NAMES)
    return None if outputs is None or name is None else listed_elements(outputs[name])


def generated_count(outputs: Fields | None) -> int | None:
    """How many of the ids of a result the model generated, which a mask may say; None: no ids."""
    listed = output_elements(outputs)
    if listed is None:
        return None
    name = first_named(outputs, MASK_NAMES)
    mask = listed_elements(outputs[name]) if outputs and name else None
    if mask is None or mask[0] != listed[0]:
        return listed[0]
    return sum(map(bool, msgspec.msgpack.decode(list_bytes(*mask))))


def generated_text(outputs: Fields) -> str | None:
    """What a result says was generated, as text."""
    return _named_text(outputs, OUTPUT_TEXT_NAMES)


def is_turn(call: Call, outputs: Fields | None) -> bool:
    """Whether a call that takes a prompt was one model generation.

    Its result says which ids were generated, or why generation stopped; or there was a prompt and
    the result, a map, says which text came of it.

    Args:
        outputs: the fields of its result; None where it has none.
    """
    if not isinstance(call, TurnCall) or call.detail or outputs is None:
        return False
    if call.kind not in (None, "generation"):
        return False
    return (
        _has_ids(outputs)
        or named_value(with_details(outputs), FINISH_NAMES) is not None
        or (_has_prompt(call) and generated_text(outputs) is not None)
    )


def prompt_hash(inputs: Fields) -> bytes | None:
    """Identity of a prompt, 16 bytes; None where there is none, or its content is unknown.

    The blake2b of what kind it is and of its elements, and of the images and the like beside it.
    The same prompt has the same one wherever it is recorded. Token ids, messages and text of one
    prompt have different ones.
    """
    try:
        prompt = _prompt(inputs)
        if prompt is None:
            return None
        digest = hashlib.blake2b(prompt, digest_size=_HASH_BYTES)
        for name in sorted(DROPPED_NAMES.intersection(inputs)):
            if bytes(inputs[name]) not in _NOTHING:
                digest.update(codec.encode(name) + _canonical(inputs[name]))
    except (_Unknown, msgspec.MsgspecError, RecursionError):
        return None
    return digest.digest()


@dataclass(slots=True)
class TurnTotals:
    """What the writer knows of the turns of an open trajectory."""

    turns: int = 0
    output_tokens: int | None = 0
    """None: there are turns, and none says its ids."""
    prompt_hash: bytes | None = None
    """Of the first turn."""
    around: set[int] = field(default_factory=set)
    """Span ids of the calls that turns were made in."""

    def settle(self, call: TurnCall, outputs: Fields | None) -> None:
        """Say whether turns are inside a call; it is then no turn of its own.

        One that says which ids it generated always is.
        """
        call.has_turns = call.span_id in self.around
        if call.has_turns and not _has_ids(outputs):
            call.detail = True

    def add(self, call: TurnCall, inputs: Fields, outputs: Fields | None) -> None:
        """Count a call that takes a prompt, if it is a turn.

        Args:
            inputs: its arguments, as they were before deltas.
        """
        self.pass_on(call)
        if not is_turn(call, outputs):
            return
        if self.turns == 0:
            self.prompt_hash = call.prompt_hash = prompt_hash(inputs)
        generated = generated_count(outputs)
        if generated is not None:
            self.output_tokens = (self.output_tokens or 0) + generated
        elif self.turns == 0:
            self.output_tokens = None
        self.turns += 1
        if call.parent_id is not None:
            self.around.add(call.parent_id)

    def pass_on(self, call: SpanCall | TurnCall) -> bool:
        """Note that a call has turns inside it, if so; its caller then has too.

        Returns:
            Whether it has.
        """
        call.has_turns = call.span_id in self.around
        if call.has_turns and call.parent_id is not None:
            self.around.add(call.parent_id)
        return call.has_turns


def _has_ids(outputs: Fields | None) -> bool:
    name = first_named(outputs, OUTPUT_NAMES)
    return outputs is not None and name is not None and is_list(outputs[name])


def _has_prompt(call: Call) -> bool:
    inputs = raw_map(call.inputs) or {}
    listed = any(is_list(inputs[name]) for name in PROMPT_NAMES + MESSAGE_NAMES if name in inputs)
    return bool(call.deltas) or listed or _named_text(inputs, PROMPT_TEXT_NAMES) is not None


def _named_text(fields: Fields, names: tuple[str, ...]) -> str | None:
    """The first of `names` that is a text."""
    values = (codec.decode(fields[name]) for name in names if name in fields)
    return next((value for value in values if isinstance(value, str)), None)


class _Unknown(Exception):
    """A value was left out, and nothing tells it from another one."""


def _prompt(inputs: Fields) -> bytes | None:
    """What a prompt is known by; kinds cannot be taken for each other.

    Raises:
        _Unknown: a part of it was left out.
    """
    for name in PROMPT_NAMES:
        ids = listed_elements(inputs[name]) if name in inputs else None
        if ids is not None and ids[0]:
            return b"ids\0" + ids[1]
    for name in MESSAGE_NAMES:
        messages = list_elements(_canonical(inputs[name])) if name in inputs else None
        if messages is not None and messages[0]:
            return b"messages\0" + messages[1]
    text = _named_text(inputs, PROMPT_TEXT_NAMES)
    return None if text is None else b"text\0" + text.encode("utf-8", "surrogatepass")


def _canonical(data: msgspec.Raw) -> bytes:
    """The same for maps that differ in the order of their keys only, where these are text."""
    value = _DECODER.decode(data)
    try:
        return _SORTED.encode(value)
    except TypeError:
        return bytes(data)


def _ext_hook(code: int, data: memoryview) -> msgspec.msgpack.Ext:
    if code == EXT:
        kind, *parts = msgspec.msgpack.decode(data)
        if kind == "omitted" and parts[-1] is None:  # without a checksum
            raise _Unknown
    return msgspec.msgpack.Ext(code, bytes(data))


_DECODER = msgspec.msgpack.Decoder(ext_hook=_ext_hook)
_SORTED = msgspec.msgpack.Encoder(order="deterministic")
