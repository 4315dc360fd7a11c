"""The calls of a synthetic batch, and what its generations say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tests.synthetic.columns import (
    Array,
    Plan,
    Shape,
    choose,
    hex_ids,
    lists,
    mixed,
    started_at,
    table_of,
)
from tests.synthetic.trajectories import KINDS, SLOT_OPS, SLOT_PARENTS, TURN_SLOTS

WORDS = np.array(
    ["\n", "exploit()", "a.b*c", "(open", "größe", "50%_", "\x1b[31mred", "[ok]", "x\\d", "The"]
    + [f"w{number}" for number in range(990)],
    object,
)
"""The vocabulary; an id is a place in it."""
NEWLINE, EXPLOIT = 0, 1
FINISH = (
    "stop", "length", '{"type": "stop", "matched": 151645}', '{"type": "length", "length": 32}',
    "max_tokens", "STOP", None, "max_length", "unknown",
)  # fmt: skip
TOOL_ERRORS = (
    "ToolError: no answer after {} s", "ValueError: bad index {} of 9",
    "KeyError: '(.*' \x1b[31m%", "TimeoutError", None,
)  # fmt: skip
OPS = {
    "run": "AgentLoop.run", "generate": "SGLangServer.generate", "tool": "search_tool",
    "execute": "Sandbox.execute", "helper": "open_page", "inner": "http_tool.get",
    "reward": "compute_reward", "grade": "Grader.run",
}  # fmt: skip


SAID = np.array(
    [
        {"run": "agent", "generate": "generation", "tool": "tool", "execute": "tool",
         "inner": "tool", "reward": "reward", "grade": "reward"}.get(name, "other")
        for name in SLOT_OPS
    ],
    object,
)  # fmt: skip
"""Kinds that recording code says, now and then."""


def span_rows(plan: Plan, shape: Shape, rng: np.random.Generator) -> pa.Table:
    """The calls of a batch, in the order of the spans' table."""
    of, slot = np.nonzero(shape.slots)
    count = len(of)
    kind = KINDS[slot]
    ids = hex_ids(rng, count, 8)
    at = np.full(shape.slots.shape, -1)
    at[of, slot] = np.arange(count)
    parents = np.where(np.array(SLOT_PARENTS)[slot] < 0, -1, at[of, np.array(SLOT_PARENTS)[slot]])
    seq = (np.cumsum(shape.slots, 1) - 1)[of, slot]
    start_ns, end_ns = shape.starts[of, slot], shape.ends[of, slot]
    is_turn = kind == "generate"
    tool = np.isin(kind, ("tool", "inner"))
    failed = (tool & (rng.random(count) < 0.08)) | (is_turn & (rng.random(count) < 0.01))
    status = np.where(failed, "error", np.where(rng.random(count) < 0.002, "cancelled", "ok"))
    errors = choose(rng, TOOL_ERRORS, [0.4, 0.3, 0.1, 0.15, 0.05], count)
    number = rng.integers(0, 100, count).astype(str)
    errors = np.array(
        [e and e.replace("{}", n) for e, n in zip(errors, number, strict=True)], object
    )
    ops = np.array([OPS[name] for name in SLOT_OPS], object)[slot]
    ops[(kind == "tool") & (rng.random(count) < 0.4)] = OPS["execute"]
    columns = {
        **plan.run_fields,
        "trace_id": shape.trace_id.take(of),
        "step": shape.step.take(of),
        "sample_index": shape.sample_index.take(of),
        "rollout_n": shape.rollout_n.take(of),
        "span_id": ids,
        "parent_id": ids.take(pa.array(parents, mask=parents < 0)),
        "seq": seq,
        "op": ops,
        "status": status.astype(object),
        "error": np.where(failed, errors, None),
        "start_ns": start_ns,
        "end_ns": end_ns,
        "started_at": started_at(start_ns),
        "inputs": np.where(is_turn, '{"sampling_params":{"temperature":1.0}}', '{"query":"x"}'),
        "outputs": np.where(is_turn, '{"num_preempted":0}', '"found"'),
        "is_turn": is_turn,
        "kind": np.where(rng.random(count) < 0.1, SAID[slot], None),
        "writer_id": shape.writer.take(of),
        "writer_seq": np.arange(count) + 10**8 * int(shape.true_step.min()),
    }
    turn = np.searchsorted(TURN_SLOTS, slot, side="right") - 1
    before = np.where(is_turn & (turn > 0), at[of, TURN_SLOTS[np.maximum(turn - 1, 0)]], -1)
    generated = is_turn & (status == "ok")
    calls = table_of(
        "spans", columns | _turns(plan, shape, rng, of, turn, is_turn, generated, ids, before)
    )
    served = np.flatnonzero(generated & (rng.random(count) < 0.02))
    carried, alone = np.array_split(served, 2)
    return pa.concat_tables(
        [calls, _engine_rows(rng, calls.take(carried)), _engine_rows(rng, calls.take(alone), True)]
    )


def _engine_rows(rng: np.random.Generator, calls: pa.Table, alone: bool = False) -> pa.Table:
    """The same generations as the engine recorded them, below their calls or on their own."""
    count = len(calls)
    start_ns, end_ns = (calls[name].to_numpy() for name in ("start_ns", "end_ns"))
    tenth = (end_ns - start_ns) // 10
    changed: dict[str, Any] = {
        "parent_id": calls["span_id"],
        "span_id": hex_ids(rng, count, 8),
        "seq": calls["seq"].to_numpy() + 100,
        "op": "sglang.generate",
        "outputs": '{"cached_tokens":3}',
        "is_turn": False,
        "start_ns": start_ns + tenth,
        "end_ns": end_ns - tenth,
        "started_at": started_at(start_ns + tenth),
    }
    if alone:
        unknown = dict.fromkeys(("parent_id", "step", "sample_index", "rollout_n"))
        changed |= unknown | {"trace_id": hex_ids(rng, count, 16), "is_turn": True}
        # One call in ten was sent on to two engines, so that neither can be told apart.
        twice = np.concatenate([np.arange(count), np.arange(0, count, 10)])
        ids = hex_ids(rng, len(twice), 8)
        rows = table_of("spans", {n: calls[n] for n in calls.column_names} | changed).take(twice)
        return table_of("spans", {n: rows[n] for n in rows.column_names} | {"span_id": ids})
    return table_of("spans", {name: calls[name] for name in calls.column_names} | changed)


def _turns(
    plan: Plan,
    shape: Shape,
    rng: np.random.Generator,
    of: Array,
    turn: Array,
    is_turn: Array,
    generated: Array,
    ids: pa.Array,
    before: Array,
) -> dict[str, Any]:
    """The columns that only generations have."""
    count = len(of)
    turn = np.maximum(turn, 0)
    key = shape.keys[of, turn]
    length = np.where(generated, shape.lengths[of, turn], 0)
    output = _tokens(plan, key, length, shape.true_step[of])
    added = np.where(is_turn, 4 + key % np.uint64(5), 0).astype(np.int64)
    prompt = _tokens(plan, key + np.uint64(1), added, np.zeros(count, np.int64))
    # Some engines give text alone, some stores have no tokenizer, some hooks no logprobs.
    text_only = rng.random(count) < 0.01
    said = np.where(text_only, 0, length)
    whole = added.copy()
    kept = np.zeros(count, np.int64)
    for number in range(1, turn.max(initial=0) + 1):
        rows = np.flatnonzero((turn == number) & (before >= 0))
        kept[rows] = whole[before[rows]] + said[before[rows]]
        whole[rows] += kept[rows]
    no_text = rng.random(count) < 0.03
    no_logprobs = rng.random(count) < 0.05
    logprobs = -rng.exponential(0.4, int(length.sum())).astype(np.float32)
    mask = np.ones(int(length.sum()), np.int8)
    return {
        "prompt_name": np.where(is_turn, "prompt_ids", None),
        "prompt_tokens": np.where(is_turn, whole, None),
        "prompt_base": ids.take(pa.array(before, mask=before < 0)),
        "prompt_kept": np.where(before >= 0, kept, None),
        "prompt_ids": lists(prompt, added, is_turn, pa.int32()),
        "prompt_crc32": np.where(is_turn, (key % np.uint64(2**32)).astype(np.int64), None),
        "output_name": np.where(generated, "token_ids", None),
        "output_ids": lists(output, length, generated & ~text_only, pa.int32()),
        "logprobs_name": np.where(generated, "log_probs", None),
        "output_logprobs": lists(
            logprobs, length, generated & ~no_logprobs & ~text_only, pa.float32()
        ),
        "response_mask": lists(mask, length, generated & (rng.random(count) < 0.1), pa.int8()),
        "prompt_text": _texts(prompt, added, is_turn & ~no_text),
        "output_text": _texts(output, length, generated & ~no_text & ((length > 0) | text_only)),
        "finish_reason": np.where(
            generated, choose(rng, FINISH, [60, 3, 25, 2, 1, 4, 5, 1, 1], count), None
        ),
        "weight_version": np.where(generated, _weights(shape, rng, of), None),
    }


def _tokens(plan: Plan, key: Array, length: Array, step: Array) -> Array:
    """Ids of all texts one after the other; some texts repeat themselves, some are an exploit."""
    of = np.repeat(np.arange(len(length)), length)
    place = np.arange(len(of)) - np.repeat(np.cumsum(length) - length, length)
    kind = (key >> np.uint64(20)) % np.uint64(1000)
    place = np.where((kind < 30)[of], place % 3, place)
    ids = (mixed(key[of] + place.astype(np.uint64) * np.uint64(7919)) % np.uint64(1000)).astype(int)
    ids = ids * ids // 1000  # small ids are frequent
    ids[(kind == 999)[of]] = NEWLINE
    exploits = ((key >> np.uint64(40)) % np.uint64(1000)).astype(int) < 200 * step // plan.steps
    ids[exploits[of] & (place == 0)] = EXPLOIT
    return ids.astype(np.int32)


def _texts(ids: Array, length: Array, known: Array) -> pa.Array:
    words = pa.array(WORDS, pa.string()).take(pa.array(ids))
    lists = pa.ListArray.from_arrays(
        pa.array(np.concatenate([[0], np.cumsum(length)]).astype(np.int32)), words
    )
    return pc.if_else(pa.array(known), pc.binary_join(lists, " "), pa.scalar(None, pa.string()))


def _weights(shape: Shape, rng: np.random.Generator, of: Array) -> Array:
    behind = rng.choice(3, len(of), p=[0.7, 0.2, 0.1])
    # All turns of a trajectory have the same weights, except where they were replaced meanwhile.
    same = rng.choice(3, len(shape.true_step), p=[0.7, 0.2, 0.1])[of]
    behind = np.where(rng.random(len(of)) < 0.9, same, behind)
    versions = (shape.true_step[of] - behind).astype(str).astype(object)
    drawn = rng.random(len(of))
    versions[drawn < 0.03] = None
    versions[drawn > 0.99] = "sha-77af"
    return versions
