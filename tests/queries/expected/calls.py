"""Calls: their times, their failures, what the engine recorded of them, and what is missing."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pandas as pd

from tests.queries.expected.rows import (
    BY_STEP,
    counted,
    counted_calls,
    group_rows,
    p95,
)
from tests.queries.facts import Facts, Frame, Groups

ENGINE_OPS = ("sglang.generate", "vllm.generate")


def time_by_kind(facts: Facts, **keys: Any) -> Frame:
    rows = counted(facts, **keys)
    rows = rows[rows["end_ns"].notna()].reset_index(drop=True)
    spans = facts.spans
    callers = pd.Index(spans["trace_id"] + spans["span_id"]).get_indexer(
        spans["trace_id"] + spans["parent_id"].fillna("none")
    )
    is_named = spans["kind"].isin(["generation", "tool", "reward"]).to_numpy()
    inside = np.zeros(len(spans), bool)
    caller = callers
    while (caller >= 0).any():
        inside |= (caller >= 0) & is_named[caller]
        caller = np.where(caller >= 0, callers[caller], -1)
    named = spans[is_named & ~inside]
    spent = named.pivot_table(
        index="trace_id", columns="kind", values="seconds", aggfunc="sum"
    ).reindex(columns=["generation", "tool", "reward"])  # fmt: skip
    spent = spent.reindex(rows["trace_id"]).fillna(0.0).reset_index(drop=True)
    lasted = (rows["end_ns"] - rows["start_ns"]).astype(float) / 1e9
    groups = Groups.of(rows, BY_STEP)
    return groups.frame(
        trajectories=groups.count(),
        duration_s=groups.mean(lasted),
        **{f"{kind}_s": groups.mean(spent[kind]) for kind in spent},
        waiting_s=groups.mean((lasted - spent.sum(axis=1)).clip(lower=0)),
    )


def tokens_per_second(facts: Facts, **keys: Any) -> Frame:
    rows = counted(facts, **keys)
    rows = rows[rows["end_ns"].notna()]
    turns = facts.turns[facts.turns["tokens"].notna()]
    made = turns.groupby("trace_id").agg(tokens=("tokens", "sum"), seconds=("seconds", "sum"))
    rows = rows.merge(made, left_on="trace_id", right_index=True).reset_index(drop=True)
    groups = Groups.of(rows, BY_STEP)
    by = rows.groupby(BY_STEP, dropna=False, sort=False)
    lasted = (by["end_ns"].max() - by["start_ns"].min()).to_numpy(float) / 1e9
    tokens = groups.sum(rows["tokens"])
    return groups.frame(
        trajectories=groups.count(),
        tokens=tokens,
        duration_s=lasted,
        tokens_per_s=tokens / np.where(lasted > 0, lasted, np.nan),
        tokens_per_s_of_one=tokens / groups.sum(rows["seconds"]),
    )


def tool_calls_by_step(facts: Facts, **keys: Any) -> Frame:
    rows = counted(facts, **keys)
    tools = facts.spans[facts.spans["kind"] == "tool"]
    calls = rows["trace_id"].map(tools["trace_id"].value_counts()).astype(float).fillna(0)
    errors = tools.loc[tools["status"] == "error", "trace_id"]
    failed = rows["trace_id"].map(errors.value_counts()).astype(float).fillna(0)
    guessed = tools.loc[~tools["said"], "trace_id"]
    derived = rows["trace_id"].map(guessed.value_counts()).astype(float).fillna(0)
    groups = Groups.of(rows, BY_STEP)
    total = groups.sum(calls)
    return groups.frame(
        trajectories=groups.count(),
        tool_calls=total,
        mean_tool_calls=groups.mean(calls),
        max_tool_calls=groups.apply(calls, np.max),
        failed_share=groups.sum(failed) / np.where(total > 0, total, np.nan),
        derived_share=groups.sum(derived) / np.where(total > 0, total, np.nan),
    )


def _newest_and_oldest(rows: Frame, groups: Groups) -> dict[str, Any]:
    every = np.ones(len(rows), bool)
    newest = {"smallest": rows["start_ns"], "ascending": False}
    return {
        "calls": groups.count(),
        "trajectories": groups.apply(rows["trace_id"].factorize()[0], lambda c: len(np.unique(c))),
        "first_step": groups.apply(rows["step"], np.min),
        "last_step": groups.apply(rows["step"], np.max),
        "newest_trace_id": groups.first(rows["trace_id"], every, **newest),
    }


def errors_by_op(facts: Facts, **keys: Any) -> Frame:
    rows = counted_calls(facts, facts.spans, **keys)
    rows = rows[rows["status"] != "ok"].reset_index(drop=True)
    rows["error_type"] = [
        one.split(":")[0] if isinstance(one, str) else None for one in rows["error"]
    ]
    groups = Groups.of(rows, ["op", "status", "error_type"])
    newest = groups.first(
        rows["error"], rows["error"].notna(), smallest=rows["start_ns"], ascending=False
    )
    return groups.frame(newest_error=newest, **_newest_and_oldest(rows, groups))


def tool_errors(facts: Facts, **keys: Any) -> Frame:
    rows = counted_calls(facts, facts.spans, **keys)
    rows = rows[(rows["status"] == "error") & (rows["kind"] == "tool")].reset_index(drop=True)
    rows["message"] = [
        re.sub("[0-9]+", "N", one) if isinstance(one, str) else None for one in rows["error"]
    ]
    groups = Groups.of(rows, ["op", "message"])
    return groups.frame(**_newest_and_oldest(rows, groups))


def tool_errors_by_step(facts: Facts, **keys: Any) -> Frame:
    rows = counted_calls(facts, facts.spans, **keys)
    rows = rows[rows["kind"] == "tool"].reset_index(drop=True)
    failed = (rows["status"] == "error").to_numpy(bool)
    groups = Groups.of(rows, [*BY_STEP, "op"])
    return groups.frame(
        calls=groups.count(),
        failed=groups.count(failed),
        failed_share=groups.count(failed) / groups.count(),
        trajectories=[
            len(set(rows["trace_id"][failed & (groups.codes == code)]))
            for code in range(len(groups.keys))
        ],
    )


def slowest_ops(facts: Facts, **keys: Any) -> Frame:
    rows = counted_calls(facts, facts.spans, **keys)
    ms = rows["seconds"] * 1000
    groups = Groups.of(rows, ["op"])
    every = np.ones(len(rows), bool)
    lasted = rows["end_ns"] - rows["start_ns"]
    return groups.frame(
        calls=groups.count(),
        total_s=groups.sum(rows["seconds"]),
        mean_ms=groups.mean(ms),
        p50_ms=groups.apply(ms, np.median),
        p95_ms=groups.apply(ms, p95),
        max_ms=groups.apply(ms, np.max),
        slowest_trace_id=groups.first(rows["trace_id"], every, smallest=lasted, ascending=False),
    )


def recording_gaps(facts: Facts, **keys: Any) -> Frame:
    usual: dict[Any, int] = {}
    every = facts.trajectories[facts.trajectories["fate"] != "baseline"]
    for (run, validate), sizes in group_rows(every).groupby(["run_id", "validate"])["n"]:
        common = sizes.value_counts()
        usual[run, validate] = max(common[common == common.max()].index)
    rows = counted(facts, **keys)
    small = group_rows(rows)
    size = [usual[key] for key in zip(small["run_id"], small["validate"], strict=True)]
    small = small[small["n"] < np.array(size, int)]
    small = small.groupby(BY_STEP, dropna=False).size().reset_index(name="small_groups")
    groups = Groups.of(rows, BY_STEP)
    of_status = {name: groups.count((rows["status"] == name).to_numpy())
                 for name in ("dropped", "interrupted", "running")}  # fmt: skip
    lost = rows[rows["status"].isin(["dropped", "interrupted"]) & rows["error"].notna()]
    reasons = lost.groupby(groups.codes[lost.index])["error"].agg(lambda one: sorted(set(one)))
    frame = groups.frame(trajectories=groups.count(), **of_status)
    frame["unplaced"] = groups.count(rows["trace_id"].isin(facts.unplaced).to_numpy())
    frame["not_finite"] = groups.count(rows["not_finite"])
    frame["reasons"] = [reasons.get(code) for code in range(len(frame))]
    frame = frame.merge(small, on=BY_STEP, how="left").fillna({"small_groups": 0})
    frame = frame.sort_values(BY_STEP).reset_index(drop=True)
    before = frame.groupby(["experiment", "run_id"])["step"].shift(1)
    return frame.assign(missing_steps_before=frame["step"] - before - 1)


def engine_calls(facts: Facts, **keys: Any) -> Frame:
    spans = facts.spans
    engine = spans[spans["op"].isin(ENGINE_OPS)]
    ids = facts.lists["output_ids"]
    callers = spans[spans["is_turn"] & ~spans["op"].isin(ENGINE_OPS)]
    alone = engine[engine["parent_id"].isna()]
    links = ["run_id", "attempt", "prompt_crc32", "prompt_tokens"]
    known = alone.merge(callers.dropna(subset=links), on=links, suffixes=("", "_of"))
    fits = [
        ids.valid[one] and ids.valid[other] and np.array_equal(ids[one], ids[other])
        for one, other in zip(known["row"], known["row_of"], strict=True)
    ]
    known = known[np.array(fits, bool)]
    second = 10**9
    known = known[
        (known["start_ns"] >= known["start_ns_of"] - second)
        & (known["start_ns"] <= known["end_ns_of"])
        & (known["end_ns"] <= known["end_ns_of"] + second)
    ]
    sure = ~known.duplicated("row", keep=False) & ~known.duplicated("row_of", keep=False)
    caller = known[sure].set_index("row")["row_of"]
    asked = spans[spans["trace_id"].isin(set(engine["trace_id"]))]
    place = dict(
        zip(zip(asked["trace_id"], asked["span_id"], strict=True), asked["row"], strict=True)
    )
    found = []
    for one in engine.to_dict("records"):
        carried = isinstance(one["parent_id"], str)
        row = place.get((one["trace_id"], one["parent_id"])) if carried else caller.get(one["row"])
        call = None if row is None else spans.iloc[int(row)]
        took = one["end_ns"] - one["start_ns"]
        outside = None if call is None else (int(call["end_ns"] - call["start_ns"]) - took) / 1e9
        step = one["step"]
        if pd.isna(step) and call is not None:
            step = call["step"]
        trace_id = one["trace_id"] if carried else None if call is None else call["trace_id"]
        found.append(
            {
                "run_id": one["run_id"], "experiment": one["experiment"], "step": step,
                "project": one["project"], "attempt": one["attempt"],
                "trace_id": trace_id, "op": one["op"], "status": one["status"],
                "joined": "carried" if carried else None if call is None else "tokens",
                "finish_reason": one["finish_reason"], "weight_version": one["weight_version"],
                "prompt_tokens": one["prompt_tokens"], "output_tokens": one["tokens"],
                "cached_tokens": json.loads(one["outputs"]).get("cached_tokens"),
                "engine_s": took / 1e9, "around_engine_s": outside,
            }
        )  # fmt: skip
    unsaid = ["run_id", "experiment", "project", "attempt"]
    columns = [*unsaid, "step", "trace_id", "joined", "op", "status",
               "finish_reason", "weight_version", "prompt_tokens", "output_tokens",
               "cached_tokens", "engine_s", "around_engine_s"]  # fmt: skip
    frame = pd.DataFrame(found, columns=columns).astype({"step": "Int64"})
    return counted_calls(facts, frame, **keys).drop(columns=unsaid)
