"""Rewards: by step, by group, by prompt, by run."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from math import comb
from typing import Any

import numpy as np
import pandas as pd

from tests.queries.expected.rows import (
    BY_STEP,
    GROUP,
    chosen,
    counted,
    deviation,
    group_rows,
    is_counted,
    named,
    p95,
)
from tests.queries.facts import Array, Facts, Frame, Groups


def reward_by_step(facts: Facts, **keys: Any) -> Frame:
    rows = chosen(facts.trajectories, **keys)
    rows = rows[(rows["fate"] != "baseline") | rows["validate"]].reset_index(drop=True)
    groups = Groups.of(rows, BY_STEP)
    of, known = is_counted(rows, **keys), rows["finite"].to_numpy(bool)
    validation, odd = rows["validate"].to_numpy(bool), rows["not_finite"].to_numpy(bool)
    reward = rows["reward"]
    return groups.frame(
        trajectories=groups.count(of),
        rewards=groups.count(of & known),
        mean_reward=groups.mean(reward, of & known),
        std_reward=groups.apply(reward, deviation, of & known),
        min_reward=groups.apply(reward, np.min, of & known),
        max_reward=groups.apply(reward, np.max, of & known),
        not_finite=groups.count(of & odd),
        validation_reward=groups.mean(reward, validation & known),
        validation_not_finite=groups.count(validation & odd),
    )


def length_by_step(facts: Facts, **keys: Any) -> Frame:
    rows = counted(facts, **keys)
    rows = rows[rows["status"].isin(["ok", "error"])].reset_index(drop=True)
    groups = Groups.of(rows, BY_STEP)
    return groups.frame(
        trajectories=groups.count(),
        mean_tokens=groups.mean(rows["output_tokens"]),
        p95_tokens=groups.apply(rows["output_tokens"], p95),
        max_tokens=groups.apply(rows["output_tokens"], np.max),
        mean_turns=groups.mean(rows["turn_count"]),
        max_turns=groups.apply(rows["turn_count"], np.max),
    )


def group_spread(facts: Facts, **keys: Any) -> Frame:
    rows = group_rows(counted(facts, **keys))
    groups = Groups.of(rows, BY_STEP)
    zero = rows["zero_variance"].map({True: 1.0, False: 0.0})
    return groups.frame(
        groups=groups.count(),
        mean_size=groups.mean(rows["n"]),
        mean_reward=groups.mean(rows["mean_reward"], (rows["rewards"] > 0).to_numpy()),
        mean_std=groups.mean(rows["std_reward"], (rows["rewards"] > 1).to_numpy()),
        zero_variance_groups=groups.count(zero == 1.0),
        zero_variance_share=groups.mean(zero),
        not_finite=groups.sum(rows["not_finite"]),
    )


def zero_variance_groups(facts: Facts, **keys: Any) -> Frame:
    members = counted(facts, **keys)
    rows = group_rows(members)
    rows = rows[rows["zero_variance"] == True]  # noqa: E712  (it may be null)
    return named(rows, members).assign(reward=rows["mean_reward"].to_numpy())[
        [*BY_STEP, "group_id", "sample_index", "prompt_hash", "n", "reward", "not_finite"]
    ]


def compare_runs(facts: Facts, a: str, b: str, **keys: Any) -> Frame:
    sides = []
    for run, mark in ((a, "a"), (b, "b")):
        rows = chosen(counted(facts, **keys), run=run)
        groups = Groups.of(rows, ["step"])
        sides.append(
            groups.frame(**{
                f"trajectories_{mark}": groups.count(),
                f"mean_reward_{mark}": groups.mean(rows["reward"], rows["finite"].to_numpy(bool)),
                f"not_finite_{mark}": groups.count(rows["not_finite"]),
                f"mean_tokens_{mark}": groups.mean(rows["output_tokens"]),
                f"mean_turns_{mark}": groups.mean(rows["turn_count"]),
            })
        )  # fmt: skip
    both = sides[0].merge(sides[1], on="step", how="outer")
    return both.assign(reward_change=both["mean_reward_b"] - both["mean_reward_a"])


@cache
def _pass_at_k(n: int, c: int, k: int) -> float:
    return float(1 - Fraction(comb(n - c, k), comb(n, k)))


@cache
def _largest_of_k(n: int, k: int) -> Array:
    """Return, for each place in order of size, the chance to be the largest of k of n."""
    return np.array([float(Fraction(comb(i, k - 1), comb(n, k))) for i in range(n)])


def estimates(rows: Frame, threshold: float) -> list[tuple[Any, ...]]:
    """Return for every group its keys, n, c, pass@k and best-of-k for every k, and not_finite."""
    found = []
    for key, group in rows[rows["grouped"]].groupby(GROUP, dropna=False):
        values = np.sort(group.loc[group["finite"], "reward"].to_numpy(float))
        n, c = len(values), int((values >= threshold).sum())
        of_k = [(_pass_at_k(n, c, k), float(_largest_of_k(n, k) @ values)) for k in range(1, n + 1)]
        found.append((key, n, c, of_k, int(group["not_finite"].sum())))
    return found


def pass_at_k(facts: Facts, threshold: Any = 1, **keys: Any) -> Frame:
    found = [
        (*key[:3], k, passes, best, odd)
        for key, _, _, of_k, odd in estimates(counted(facts, **keys), float(threshold))
        for k, (passes, best) in enumerate(of_k, start=1)
    ]
    frame = pd.DataFrame(found, columns=[*BY_STEP, "k", "pass_at_k", "best_of_k", "odd"])
    groups = Groups.of(frame, [*BY_STEP, "k"])
    return groups.frame(
        prompts=groups.count(),
        pass_at_k=groups.mean(frame["pass_at_k"]),
        best_of_k=groups.mean(frame["best_of_k"]),
        not_finite=groups.sum(frame["odd"]),
    )


def pass_at_k_by_prompt(facts: Facts, k: Any, threshold: Any = 1, **keys: Any) -> Frame:
    members = counted(facts, **keys)
    k = int(k)
    found = [
        (*key, n, c, *of_k[k - 1], odd)
        for key, n, c, of_k, odd in estimates(members, float(threshold))
        if 1 <= k <= n
    ]
    columns = ["n", "passed", "pass_at_k", "best_of_k", "not_finite"]
    frame = pd.DataFrame(found, columns=[*GROUP, *columns])
    return named(frame, members)[[*BY_STEP, "group_id", "sample_index", "prompt_hash", *columns]]


def prompts_changed(facts: Facts, from_step: Any, to_step: Any, **keys: Any) -> Frame:
    rows = counted(facts, **keys)
    rows = rows.assign(prompt=rows["prompt_hash"].fillna(rows["sample_index"]))
    rows = rows[rows["prompt"].notna()]
    index = ["experiment", "run_id", "prompt"]
    both_steps = rows["step"].isin([int(from_step), int(to_step)]).to_numpy(bool)
    odd = rows[both_steps & rows["not_finite"]].groupby(index).size()
    rows = rows[rows["finite"]]
    sides = []
    for name, step in (("from", from_step), ("to", to_step)):
        part = rows[(rows["step"] == int(step)).fillna(False).to_numpy(bool)].reset_index(drop=True)
        groups = Groups.of(part, index)
        sides.append(
            groups.frame(**{
                f"{name}_reward": groups.mean(part["reward"], np.ones(len(part), bool)),
                f"{name}_rollouts": groups.count(),
            })
        )  # fmt: skip
    both = sides[0].merge(sides[1], on=index)
    odd = both.merge(odd.reset_index(name="not_finite"), on=index, how="left")["not_finite"]
    return both.assign(change=both["to_reward"] - both["from_reward"], not_finite=odd.fillna(0))


def same_prompt(
    facts: Facts, prompt_hash: str | None = None, sample_index: Any = None, **keys: Any
) -> Frame:
    rows = counted(facts, **keys)
    keep = np.full(len(rows), prompt_hash is not None or sample_index is not None)
    if prompt_hash is not None:
        keep &= (rows["prompt_hash"] == prompt_hash).to_numpy(bool)
    if sample_index is not None:
        keep &= (rows["sample_index"] == str(sample_index)).to_numpy(bool)
    rows = rows[keep].reset_index(drop=True)
    last = facts.turns.drop_duplicates("trace_id", keep="last").set_index("trace_id")
    rows["answer"] = rows["trace_id"].map(last["output_text"])
    groups = Groups.of(rows, BY_STEP)
    known = rows["finite"].to_numpy(bool)
    place = list(zip(rows["reward"].where(known, -np.inf), rows["trace_id"], strict=True))
    everyone = np.ones(len(rows), bool)
    best = {"smallest": place, "ascending": False}
    return groups.frame(
        rollouts=groups.count(),
        mean_reward=groups.mean(rows["reward"], known),
        max_reward=groups.apply(rows["reward"], np.max, known),
        not_finite=groups.count(rows["not_finite"]),
        mean_tokens=groups.mean(rows["output_tokens"]),
        best_trace_id=groups.first(rows["trace_id"], everyone, **best),
        best_answer=groups.first(rows["answer"], everyone, **best),
    )
