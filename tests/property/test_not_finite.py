"""A value that is not finite matches no comparison, enters no aggregate, and is counted."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localtrace.read.filters import Filters
from tests.snapshots import store_of

SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
         "=": operator.eq, "!=": operator.ne}  # fmt: skip
REWARDS = st.lists(
    st.one_of(
        st.none(),
        st.floats(),
        st.sampled_from([math.nan, math.inf, -math.inf, 5e-324, -0.0, 1.0, 1.7976931348623157e308]),
    ),
    max_size=12,
)
"""Rewards of the rollouts of one group."""


def finite_of(rewards: Sequence[float | None]) -> list[float]:
    return [one for one in rewards if one is not None and math.isfinite(one)]


def not_finite_in(rewards: Sequence[float | None]) -> int:
    return sum(one is not None and not math.isfinite(one) for one in rewards)


def rows_of(rewards: Sequence[float | None]) -> list[dict[str, Any]]:
    return [
        {"trace_id": str(n), "step": 1, "sample_index": "s", "rollout_n": n, "reward": reward}
        for n, reward in enumerate(rewards)
    ]


@settings(deadline=None)
@given(
    rewards=REWARDS,
    sign=st.sampled_from(sorted(SIGNS)),
    against=st.one_of(
        st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**53), 2**53)
    ),
    late=st.booleans(),
)
def test_a_comparison_finds_what_plain_python_finds_among_finite_rewards(
    rewards: list[float | None], sign: str, against: float, late: bool
) -> None:
    rows = rows_of(rewards)
    outcomes = [
        {"trace_id": row["trace_id"], "name": "reward", "number": row.pop("reward")}
        for row in (rows if late else [])
        if row["reward"] is not None
    ]
    wanted = {
        str(n)
        for n, reward in enumerate(rewards)
        if reward is not None and math.isfinite(reward) and SIGNS[sign](reward, against)
    }
    with store_of(trajectories=rows, outcomes=outcomes) as store:
        in_python = store.trajectories(reward=f"{sign}{against!r}").to_dicts()
        (term,) = Filters.parse([f"reward{sign}{against!r}"]).terms
        assert term.value == against
        condition, params = Filters.parse([f"reward{sign}{against!r}"]).where_clause()
        as_text = store.sql(f"select trace_id from trajectories where {condition}", params)
        odd = {row["trace_id"] for row in store.trajectories(reward="not_finite").to_dicts()}
    assert {row["trace_id"] for row in in_python} == wanted
    assert set(as_text.to_arrow()["trace_id"].to_pylist()) == wanted
    assert odd == {
        str(n) for n, one in enumerate(rewards) if one is not None and not math.isfinite(one)
    }


@settings(deadline=None)
@given(REWARDS)
def test_a_group_sums_up_its_finite_rewards_and_counts_the_others(
    rewards: list[float | None],
) -> None:
    finite = finite_of(rewards)
    with store_of(trajectories=rows_of(rewards)) as store:
        found = store.sql("select * from groups").to_dicts()
    if not rewards:
        assert found == []
        return
    (group,) = found
    assert group["n"] == len(rewards)
    assert group["rewards"] == len(finite)
    assert group["not_finite"] == not_finite_in(rewards)
    assert group["min_reward"] == min(finite, default=None)
    assert group["max_reward"] == max(finite, default=None)
    assert group["zero_variance"] == (len(set(finite)) == 1 if len(finite) > 1 else None)
    widest = max(map(abs, finite), default=0.0)
    if not finite:
        assert group["mean_reward"] is None
    elif widest < 1e300:
        assert group["mean_reward"] == pytest.approx(
            statistics.fmean(finite), rel=1e-9, abs=1e-9 * widest
        )
    elif group["mean_reward"] is not None:  # null where the sum is beyond the range of doubles
        assert math.isfinite(group["mean_reward"])
    if len(finite) < 2:
        assert group["std_reward"] is None
    elif widest < 1e150:
        assert group["std_reward"] == pytest.approx(
            statistics.stdev(finite), rel=1e-6, abs=1e-7 * widest
        )
    elif group["std_reward"] is not None:
        assert math.isfinite(group["std_reward"])
