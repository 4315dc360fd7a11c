"""Outcomes of training: what a rank of Megatron is about to train on, joined by trace id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from localtrace.trainer_hooks.environment import trace_id_in_job
from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.token_means import Rows, in_memory, record_training

SOURCE = "slime.trainer"
_TOKEN_NAMES = {
    "advantages": "advantages",
    "log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_prob",
    "rollout_log_probs": "rollout_log_probs",
}
"""Names of outcomes, by the trainer's list with one tensor per sample."""


@harmless
def record_batch(rollout_id: int, args: Any, rollout_data: Mapping[str, Any]) -> None:
    """Record that this rank trains on samples, with their advantages and differences of logprobs.

    Args:
        rollout_data: slime's batch of this rank; its lists have one item per sample.
    """
    indices = rollout_data["sample_indices"]
    if not indices:
        return
    masks, size = in_memory(rollout_data["loss_masks"]), args.n_samples_per_prompt or 1
    rows = _lone_rows(rollout_data, masks)
    values = token_values(rollout_data)
    record_training(
        [trace_id_in_job("slime", rollout_id, indices[row]) for row in rows],
        {name: [one[row] for row in rows] for name, one in values.items()},
        [masks[row] for row in rows],
        [f"{rollout_id}-{indices[row] // size}" for row in rows],
        step=rollout_id,
        trained_step=rollout_id,
        source=SOURCE,
    )


def _lone_rows(rollout_data: Mapping[str, Any], masks: Rows) -> list[int]:
    """Return the rows whose sample is its whole rollout, which alone have a trace id known here."""
    indices, sums = rollout_data["sample_indices"], rollout_data.get("rollout_mask_sums")
    own = [float(mask.sum()) for mask in masks]
    whole = own if sums is None else sums.tolist()
    times_seen = Counter(indices)
    return [
        row
        for row, index in enumerate(indices)
        if index is not None and times_seen[index] == 1 and own[row] == whole[row]
    ]


def token_values(rollout_data: Mapping[str, Any]) -> dict[str, Rows]:
    """Return the numbers per token by the names of their outcomes, with one tensor per sample.

    With context parallelism a rank has only parts of the responses, whose values are left out.
    """
    lengths = rollout_data["response_lengths"]
    return {
        name: in_memory(rollout_data[key])
        for key, name in _TOKEN_NAMES.items()
        if rollout_data.get(key)
        and all(len(one) == size for one, size in zip(rollout_data[key], lengths, strict=True))
    }
