"""Queries name the same one of rollouts that tie, in whatever order the rows are read."""

from __future__ import annotations

from itertools import permutations

from tests.snapshots import store_of

CALLS = [
    {
        "trace_id": trace_id, "span_id": trace_id, "step": 1, "op": "tool", "kind": "tool",
        "status": "error", "error": "ValueError: no", "start_ns": 5, "end_ns": 9,
    }
    for trace_id in "abc"
]  # fmt: skip


def test_ties_in_time_are_decided_alike_whatever_the_order_of_the_rows() -> None:
    named = set()
    for calls in permutations(CALLS):
        rows = [{"trace_id": call["trace_id"], "step": 1} for call in calls]
        differences = [
            {"trace_id": call["trace_id"], "step": 1, "name": "logprob_diff_mean", "number": 0.5}
            for call in calls
        ]
        with store_of(trajectories=rows, spans=list(calls), outcomes=differences) as store:
            named.add(
                tuple(
                    row[column]
                    for query, column in (
                        ("errors_by_op", "newest_trace_id"),
                        ("tool_errors", "newest_trace_id"),
                        ("slowest_ops", "slowest_trace_id"),
                        ("logprob_difference", "worst_trace_id"),
                    )
                    for row in store.query(query).to_dicts()
                )
            )
    assert named == {("c", "c", "c", "c")}
