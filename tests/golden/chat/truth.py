"""The right answer of every query about `script.py`, worked out by hand.

Keys of rows are steps, or what a query lists. Means are of training rollouts; step 1 has five of
them in two groups, step 2 has two in one group and a rollout of validation.
"""

from __future__ import annotations

from typing import Any

Rows = list[dict[str, Any]]

QUERIES: dict[str, Rows] = {
    "reward_by_step": [
        # 1, 0.5, 0, 1, 1
        {"step": 1, "trajectories": 5, "rewards": 5, "mean_reward": 0.7, "min_reward": 0.0,
         "max_reward": 1.0, "validation_reward": None},
        {"step": 2, "trajectories": 2, "rewards": 2, "mean_reward": 0.0, "min_reward": 0.0,
         "max_reward": 0.0, "validation_reward": 1.0},
    ],
    "group_spread": [
        # Groups of 3 and 2; their means are 0.5 and 1; the second one's rewards are all the same.
        {"step": 1, "groups": 2, "mean_size": 2.5, "mean_reward": 0.75, "zero_variance_groups": 1,
         "zero_variance_share": 0.5},
        {"step": 2, "groups": 1, "mean_size": 2.0, "mean_reward": 0.0, "zero_variance_groups": 1,
         "zero_variance_share": 1.0},
    ],
    "zero_variance_groups": [
        {"step": 1, "group_id": "1-double", "n": 2, "reward": 1.0},
        {"step": 2, "group_id": "2-add", "n": 2, "reward": 0.0},
    ],
    "pass_at_k": [
        # k = 1: one of three passes, two of two; k = 2: 1 - C(2,2)/C(3,2) = 2/3, and 1.
        # Best of two of 0, 0.5, 1: (0.5 + 1 + 1) / 3.
        {"step": 1, "k": 1, "prompts": 2, "pass_at_k": (1 / 3 + 1) / 2, "best_of_k": 0.75},
        {"step": 1, "k": 2, "prompts": 2, "pass_at_k": (2 / 3 + 1) / 2,
         "best_of_k": (2.5 / 3 + 1) / 2},
        {"step": 1, "k": 3, "prompts": 1, "pass_at_k": 1.0, "best_of_k": 1.0},
        {"step": 2, "k": 1, "prompts": 1, "pass_at_k": 0.0, "best_of_k": 0.0},
        {"step": 2, "k": 2, "prompts": 1, "pass_at_k": 0.0, "best_of_k": 0.0},
    ],
    "tool_calls_by_step": [
        # calculator; calculator and look_up; calculator and run_python. Three of five failed.
        {"step": 1, "trajectories": 5, "tool_calls": 5, "mean_tool_calls": 1.0,
         "max_tool_calls": 2, "failed_share": 0.6, "derived_share": 1.0},
        {"step": 2, "trajectories": 2, "tool_calls": 0, "mean_tool_calls": 0.0,
         "max_tool_calls": 0, "failed_share": None, "derived_share": None},
    ],
    "tool_errors": [
        {"op": "calculator", "message": "ValueError: could not convert string to float: ''",
         "calls": 1, "trajectories": 1, "first_step": 1, "last_step": 1},
        {"op": "calculator", "message": "ZeroDivisionError: float division by zero", "calls": 1,
         "trajectories": 1, "first_step": 1, "last_step": 1},
        {"op": "run_python", "message": "PermissionError: no sandbox for N characters", "calls": 1,
         "trajectories": 1, "first_step": 1, "last_step": 1},
    ],
    "errors_by_op": [
        {"op": "calculator", "status": "error", "error_type": "ValueError", "calls": 1},
        {"op": "calculator", "status": "error", "error_type": "ZeroDivisionError", "calls": 1},
        # The one rollout outside of threads that earned everything could not be published.
        {"op": "publish", "status": "error", "error_type": "ConnectionError", "calls": 1},
        {"op": "run_python", "status": "error", "error_type": "PermissionError", "calls": 1},
    ],
    "finish_reasons_by_step": [
        # Turns of step 1: 2 + 2 + 2 + 1 + 1; four of them ended on a call.
        {"step": 1, "finish_reason": "stop", "turns": 4, "share": 0.5, "mean_tokens": None},
        {"step": 1, "finish_reason": "tool_calls", "turns": 4, "share": 0.5, "mean_tokens": None},
        {"step": 2, "finish_reason": "length", "turns": 1, "share": 0.5, "mean_tokens": None},
        {"step": 2, "finish_reason": "stop", "turns": 1, "share": 0.5, "mean_tokens": None},
    ],
    "length_by_step": [
        {"step": 1, "trajectories": 5, "mean_tokens": None, "mean_turns": 1.6, "max_turns": 2},
        {"step": 2, "trajectories": 2, "mean_tokens": None, "mean_turns": 1.0, "max_turns": 1},
    ],
    "truncated_by_step": [
        {"step": 1, "trajectories": 5, "truncated": 0, "truncated_share": 0.0},
        {"step": 2, "trajectories": 2, "truncated": 1, "truncated_share": 0.5,
         "mean_reward_truncated": 0.0, "mean_reward_others": 0.0},
    ],
    "recording_gaps": [
        {"step": 1, "trajectories": 5, "dropped": 0, "interrupted": 0, "running": 0, "unplaced": 0},
        {"step": 2, "trajectories": 2, "dropped": 0, "interrupted": 0, "running": 0, "unplaced": 0},
    ],
}  # fmt: skip

WITH_VALUES: list[tuple[str, dict[str, Any], Rows]] = [
    # The word is in a call's arguments, and nowhere in what was said as text.
    ("text_hits", {"text": "print(2+3)"}, [
        {"step": 1, "trajectories": 5, "hits": 1, "hit_rate": 0.2, "mean_reward_hits": 0.0},
        {"step": 2, "trajectories": 2, "hits": 0, "hit_rate": 0.0},
    ]),
    # The word is in the reasoning.
    ("text_hits", {"text": "lexicon"}, [
        {"step": 1, "hits": 1, "mean_reward_hits": 0.5}, {"step": 2, "hits": 0},
    ]),
    ("text_hits", {"text": "The answer is"}, [
        {"step": 1, "hits": 1, "mean_reward_hits": 1.0},
        {"step": 2, "hits": 1, "mean_reward_hits": 0.0},
    ]),
    ("pass_at_k", {"validate": True}, [
        {"step": 2, "k": 1, "prompts": 1, "pass_at_k": 1.0, "best_of_k": 1.0},
    ]),
    ("pass_at_k_by_prompt", {"k": 2}, [
        {"step": 2, "sample_index": "add", "n": 2, "passed": 0, "pass_at_k": 0.0},
        {"step": 1, "sample_index": "add", "n": 3, "passed": 1, "pass_at_k": 2 / 3},
        {"step": 1, "sample_index": "double", "n": 2, "passed": 2, "pass_at_k": 1.0},
    ]),
    ("same_prompt", {"sample_index": "add"}, [
        {"step": 1, "rollouts": 3, "mean_reward": 0.5, "max_reward": 1.0,
         "best_answer": "The answer is 5."},
        {"step": 2, "rollouts": 2, "mean_reward": 0.0, "max_reward": 0.0},
    ]),
    ("prompts_changed", {"from_step": 1, "to_step": 2}, [
        {"sample_index": "add", "from_reward": 0.5, "to_reward": 0.0, "change": -0.5,
         "from_rollouts": 3, "to_rollouts": 2},
    ]),
]  # fmt: skip

KINDS = {
    "chat": "generation", "chat_in_a_thread": "generation", "calculator": "tool",
    "look_up": "tool", "run_python": "tool", "grade": "reward", "publish": "other",
}  # fmt: skip
"""Every call of the loop, and what it is."""

DETECTED = {
    # truncated, empty, duplicate, tool_errors
    (1, "add", 0): (False, False, False, 0),
    (1, "add", 1): (False, False, False, 1),
    (1, "add", 2): (False, False, False, 2),
    (1, "double", 0): (False, False, True, 0),
    (1, "double", 1): (False, False, True, 0),
    (2, "add", 0): (True, False, False, 0),
    (2, "add", 1): (False, True, False, 0),
    (2, "double", 0): (False, False, False, 0),
}
