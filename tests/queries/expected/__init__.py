"""The right answer of each named query, from `facts.py`, as the query's description says.

One function per query, of the same name and parameters. It returns a frame whose columns are those
of the query; their order and that of the rows mean nothing.
"""

from __future__ import annotations

from tests.queries.expected.answers import (
    empty_or_duplicated,
    entropy_by_step,
    finish_reasons_by_step,
    length_outliers,
    logprob_difference,
    repetition_by_step,
    staleness,
    text_hits,
    truncated_by_step,
)
from tests.queries.expected.calls import (
    engine_calls,
    errors_by_op,
    recording_gaps,
    slowest_ops,
    time_by_kind,
    tokens_per_second,
    tool_calls_by_step,
    tool_errors,
    tool_errors_by_step,
)
from tests.queries.expected.rewards import (
    compare_runs,
    group_spread,
    length_by_step,
    pass_at_k,
    pass_at_k_by_prompt,
    prompts_changed,
    reward_by_step,
    same_prompt,
    zero_variance_groups,
)

__all__ = [
    "compare_runs",
    "empty_or_duplicated",
    "engine_calls",
    "entropy_by_step",
    "errors_by_op",
    "finish_reasons_by_step",
    "group_spread",
    "length_by_step",
    "length_outliers",
    "logprob_difference",
    "pass_at_k",
    "pass_at_k_by_prompt",
    "prompts_changed",
    "recording_gaps",
    "repetition_by_step",
    "reward_by_step",
    "same_prompt",
    "slowest_ops",
    "staleness",
    "text_hits",
    "time_by_kind",
    "tokens_per_second",
    "tool_calls_by_step",
    "tool_errors",
    "tool_errors_by_step",
    "truncated_by_step",
    "zero_variance_groups",
]
