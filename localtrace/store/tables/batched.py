"""Rows for a call that made several generations: for a batch of prompts, or samples of one prompt.

The call's own row holds what was recorded, and a replay sends that one. The rows made here let
queries see each generation. They depend on the record alone, so they are the same at every reading.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
import pyarrow as pa

from localtrace.field_names import MESSAGE_NAMES, PROMPT_NAMES, PROMPT_TEXT_NAMES
from localtrace.store.journal.checksum import crc32
from localtrace.store.journal.results import Fields
from localtrace.store.journal.turns import Generation
from localtrace.store.tables.generated import Row, add_generated, ids_column
from localtrace.values import codec
from localtrace.values.encoded import listed_elements

_SAME = (
    "trace_id", "step", "sample_index", "rollout_n", "seq", "op", "status", "error", "start_ns",
    "end_ns", "started_at", "kind", "weight_version",
)  # fmt: skip
_PROMPT = (
    "prompt_name", "prompt_tokens", "prompt_base", "prompt_kept", "prompt_ids", "prompt_crc32",
    "messages_name", "messages_base", "messages_kept", "messages", "messages_crc32", "placeholder",
)  # fmt: skip
_NO_IDS = pa.nulls(0, pa.int32())
"""An empty list; to make one, `pa.array` would import pandas if that is installed."""


def rows_of(
    call: Row, inputs: Fields, lengths: Mapping[str, int | None], made: list[Generation]
) -> list[Row]:
    """Return one row for each generation of a call.

    Args:
        call: the row of the call.
        inputs: the call's arguments.
        lengths: whole length of each list argument of the call; None: it cannot be rebuilt.
        made: the generations, each of which has an index.
    """
    return [_row(call, inputs, lengths, one, is_first=one is made[0]) for one in made]


def _row(
    call: Row,
    inputs: Fields,
    lengths: Mapping[str, int | None],
    generation: Generation,
    *,
    is_first: bool,
) -> Row:
    assert generation.index is not None
    row = {name: call.get(name) for name in _SAME}
    row |= {
        "span_id": _span_id(call["span_id"], generation.index),
        "parent_id": call["span_id"],
        "is_turn": True,
        "batch_index": generation.index,
    }
    if generation.prompt is None:
        # The first generation has the call's new elements; the others refer to the call for them.
        row |= {n: call.get(n) for n in _PROMPT} if is_first else _shared_prompt(call, lengths)
        left = {name: inputs[name] for name in PROMPT_TEXT_NAMES if name in inputs}
    else:
        left = _own_prompt(generation.prompt, row)
    row["inputs"] = codec.msgpack_to_json(msgspec.msgpack.encode(left))
    add_generated(generation.outputs, row)
    return row


def _span_id(call: str, index: int) -> str:
    return hashlib.blake2b(f"{call}/{index}".encode(), digest_size=8).hexdigest()


def _shared_prompt(call: Row, lengths: Mapping[str, int | None]) -> Row:
    """Return a prompt that is the call's whole prompt, with nothing added."""
    row: Row = {"placeholder": call.get("placeholder")}
    for kind, nothing in (("prompt", {"prompt_ids": _NO_IDS}), ("messages", {"messages": "[]"})):
        name = call.get(f"{kind}_name")
        length = lengths.get(name) if name is not None else None
        if length is None:
            continue
        row |= {
            f"{kind}_name": name,
            f"{kind}_base": call["span_id"],
            f"{kind}_kept": length,
            f"{kind}_crc32": call[f"{kind}_crc32"],
            **nothing,
        }
        if kind == "prompt":
            row["prompt_tokens"] = length
    return row


def _own_prompt(prompt: Fields, row: Row) -> Fields:
    """Put a generation's own prompt into columns, and return the fields that have no column."""
    left = dict(prompt)
    for name, value in prompt.items():
        listed = listed_elements(value)
        if listed is None:
            continue
        count, elements = listed
        ids = ids_column(value) if name in PROMPT_NAMES else None
        if ids is not None:
            row |= {"prompt_ids": ids, "prompt_tokens": count}
        elif name in MESSAGE_NAMES:
            row["messages"] = codec.msgpack_to_json(value)
        else:
            continue
        kind = "prompt" if ids is not None else "messages"
        row |= {f"{kind}_name": name, f"{kind}_kept": 0, f"{kind}_crc32": crc32(elements)}
        del left[name]
    return left
