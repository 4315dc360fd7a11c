"""A query whose inputs were not recorded says which, instead of finding nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from localtrace.errors import NothingRecorded
from localtrace.read.named_queries import load_queries
from localtrace.read.store import Store
from tests.snapshots import Row, store_of

RUN: Row = {"experiment": "e", "run_id": "r", "step": 1}
BARE: Row = {**RUN, "trace_id": "t", "status": "ok", "validate": False}
"""A trajectory of which nothing else is known."""
LACKING = {
    "compare_runs": ".* id is a",
    "empty_or_duplicated": "turns",
    "engine_calls": ".* SGLang or vLLM",
    "entropy_by_step": "log-probabilities",
    "errors_by_op": "calls",
    "finish_reasons_by_step": "turns",
    "group_spread": "groups",
    "length_outliers": "token ids",
    "logprob_difference": ".* logprob_diff_mean",
    "pass_at_k": "groups",
    "pass_at_k_by_prompt": "groups",
    "prompts_changed": "rewards",
    "repetition_by_step": "turns",
    "same_prompt": "prompt_hash=… or sample_index=…",
    "slowest_ops": "calls .*times",
    "text_hits": "text=… or regex=…",
    "tokens_per_second": "token ids",
    "tool_errors": "calls of tools",
    "tool_errors_by_step": "calls of tools",
    "truncated_by_step": "turns",
    "zero_variance_groups": "groups",
}


def required(name: str) -> dict[str, Any]:
    return {key: "1" for key, needed in load_queries()[name].parameters.items() if needed}


@pytest.fixture(scope="module")
def bare() -> Iterator[Store]:
    with store_of(trajectories=[BARE]) as store:
        yield store


@pytest.fixture(scope="module")
def empty() -> Iterator[Store]:
    with store_of() as store:
        yield store


@pytest.mark.parametrize("name", LACKING)
def test_a_query_says_what_it_needs_where_a_rollout_recorded_nothing_else(
    name: str, bare: Store
) -> None:
    with pytest.raises(NothingRecorded, match=f"^query {name} needs {LACKING[name]}"):
        bare.query(name, **required(name))


def test_every_other_query_has_rows_for_a_rollout_of_which_nothing_else_is_known(
    bare: Store,
) -> None:
    for name in load_queries().keys() - LACKING.keys():
        assert len(bare.query(name, **required(name))) == 1, name


@pytest.mark.parametrize("name", load_queries())
def test_a_store_without_rollouts_lacks_nothing_in_particular(name: str, empty: Store) -> None:
    assert len(empty.query(name, **required(name))) == 0


def test_no_errors_are_good_news_and_no_lack() -> None:
    turn = {**RUN, "trace_id": "t", "span_id": "1", "seq": 0, "is_turn": True, "status": "ok"}
    call = {**turn, "span_id": "2", "seq": 1, "is_turn": False, "kind": "tool", "op": "look_up"}
    with store_of(trajectories=[BARE], spans=[turn, call]) as store:
        for name in ("tool_errors", "errors_by_op", "empty_or_duplicated"):
            assert len(store.query(name)) == 0
