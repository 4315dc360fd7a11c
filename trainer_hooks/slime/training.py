"""Outcomes of training: what a rank of Megatron is about to train on, joined by trace id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from localtrace.record.session import outcome
from localtrace.record.tensor_batches import record_tensors
from localtrace.trainer_hooks.environment import hook_settings, is_chosen, trace_id_in_job
from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.token_means import Rows, in_memory, means

SOURCE = "slime.trainer"
_TOKEN_NAMES = {
    "advantages": "advantages",
    "log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_prob",
    "rollout_log_probs": "rollout_log_probs",
}
"""Names of outcomes, by the trainer's list with one tensor per sample."""


@harmless
def record_training(rollout_id: int, args: Any, rollout_data: Mapping[str, Any]) -> None:
    """Record that this rank trains on samples, with their advantages and differences of logprobs.

    Args:
        rollout_data: slime's batch of this rank; its lists have one item per sample.
    """
    indices = rollout_data["sample_indices"]
    if not indices:
        return
    masks = in_memory(rollout_data["loss_masks"])
    rows = _lone_rows(rollout_data, masks)
    ids = {row: trace_id_in_job("slime", rollout_id, indices[row]) for row in rows}
    trained = [row for row in rows if masks[row].any()]
    outcome(
        [ids[row] for row in trained],
        step=rollout_id,
        source=SOURCE,
        fate=["trained"] * len(trained),
        trained_step=[rollout_id] * len(trained),
    )
    values = token_values(rollout_data)
    if trained and values:
        found = means(values, masks, trained)
        outcome([ids[row] for row in trained], step=rollout_id, source=SOURCE, **found)
    size, share = args.n_samples_per_prompt or 1, hook_settings().trainer_tokens
    chosen = [row for row in rows if is_chosen(f"{rollout_id}-{indices[row] // size}", share)]
    if chosen and values:
        record_tensors(
            [ids[row] for row in chosen],
            step=rollout_id,
            source=SOURCE,
            **{name: [one[row] for row in chosen] for name, one in values.items()},
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
