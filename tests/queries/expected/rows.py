"""The common part of the computations: rows that count, their groups, their measures."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.queries.facts import Array, Facts, Frame, Groups

BY_STEP = ["experiment", "run_id", "step"]
GROUP = [*BY_STEP, "validate", "group"]


def chosen(rows: Frame, **keys: Any) -> Frame:
    """The rows that the filters that every query takes leave; it says nothing of `validate`."""
    keep = np.ones(len(rows), bool)
    for key in {"run", "project", "experiment", "attempt", "step"} & keys.keys():
        column, value = rows["run_id" if key == "run" else key], str(keys[key])
        if key in ("attempt", "step") and ".." in value:
            low, _, high = value.partition("..")
            met = (column >= int(low)) & (column <= int(high or 10**9))
        else:
            met = column.astype("string") == value
        keep &= met.fillna(False).to_numpy(bool)
    return rows[keep].reset_index(drop=True)


def is_validation(validate: Any = False, **_: Any) -> bool:
    """Return whether a query is asked about validation."""
    return str(validate).lower() == "true"


def is_counted(rows: Frame, **keys: Any) -> Array:
    """Return which trajectories are asked for: those of validation, or of training."""
    if is_validation(**keys):
        return rows["validate"].to_numpy(bool)
    return (~rows["validate"] & (rows["fate"] != "baseline")).to_numpy(bool)


def counted(facts: Facts, **keys: Any) -> Frame:
    """The trajectories that a query looks at: those of training, unless it is asked otherwise."""
    rows = facts.trajectories
    return chosen(rows[is_counted(rows, **keys)], **keys)


def counted_calls(facts: Facts, rows: Frame, **keys: Any) -> Frame:
    """The calls that a query looks at; those whose trajectory is unknown count as training."""
    everything = facts.everything
    is_meant = is_counted(everything, **keys) & ~everything["superseded"].to_numpy(bool)
    if is_validation(**keys):
        meant = rows["trace_id"].isin(set(everything.loc[is_meant, "trace_id"]))
    else:
        meant = ~rows["trace_id"].isin(set(everything.loc[~is_meant, "trace_id"]))
    return chosen(rows[meant], **keys)


def with_trajectory(rows: Frame, trajectories: Frame) -> Frame:
    """Calls with the columns of their trajectories, which are chosen by the second frame."""
    columns = ["trace_id", *BY_STEP, "validate", "reward", "finite", "not_finite"]
    return rows.drop(columns=[*BY_STEP]).merge(trajectories[columns], on="trace_id")


def deviation(values: Array) -> float:
    """Standard deviation of a sample; none of a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else np.nan


def p95(values: Array) -> float:
    """The 95th percentile, between two values where it falls there."""
    return float(np.quantile(values, 0.95))


def group_rows(rows: Frame) -> Frame:
    """The groups of trajectories, as GRPO sees them."""
    rows = rows[rows["grouped"]].reset_index(drop=True)
    groups = Groups.of(rows, GROUP)
    known = rows["finite"].to_numpy(bool)
    low = groups.apply(rows["reward"], np.min, known)
    high = groups.apply(rows["reward"], np.max, known)
    rewards = groups.count(known)
    same = low == high
    return groups.frame(
        not_finite=groups.count(rows["not_finite"]),
        n=groups.count(),
        rewards=rewards,
        mean_reward=groups.mean(rows["reward"], known),
        std_reward=groups.apply(rows["reward"], deviation, known),
        zero_variance=np.where(rewards > 1, same, None),
    )


def named(groups: Frame, members: Frame) -> Frame:
    """Groups with what their members share: the group_id, the sample_index, the prompt_hash."""
    names = ["group_id", "sample_index", "prompt_hash"]
    first = members.groupby(GROUP, dropna=False)[names].first().reset_index()
    return groups.reset_index(drop=True).merge(first, on=GROUP, how="left")
