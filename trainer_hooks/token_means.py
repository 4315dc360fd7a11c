"""What a trainer did with samples, from its numbers per token: fate, advantage, logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from localtrace.record.session import outcome
from localtrace.record.tensor_batches import record_tensors
from localtrace.trainer_hooks.environment import hook_settings, is_chosen

if TYPE_CHECKING:
    import torch

Rows = list["torch.Tensor"]
"""One tensor per sample, with one number per token."""


def record_training(
    ids: Sequence[str],
    values: Mapping[str, Rows],
    masks: Rows,
    groups: Sequence[Any],
    *,
    step: int | None,
    trained_step: int,
    source: str,
) -> None:
    """Record that a trainer trains on samples, as far as tokens of them count in the loss.

    Args:
        ids: trace ids.
        values: numbers per token by the names of their outcomes.
        masks: 1 for each token that counts.
        groups: group of each sample; for a share of them the numbers per token are recorded.
        step: step at which they were launched.
    """
    trained = [row for row, mask in enumerate(masks) if mask.any()]
    named: dict[str, list[Any]] = {"fate": ["trained"] * len(trained)}
    named["trained_step"] = [trained_step] * len(trained)
    named |= means(values, masks, trained)
    outcome([ids[row] for row in trained], step=step, source=source, **named)
    share = hook_settings().trainer_tokens
    chosen = [row for row, group in enumerate(groups) if is_chosen(group, share)]
    if chosen and values:
        tokens = {name: [rows[row] for row in chosen] for name, rows in values.items()}
        record_tensors([ids[row] for row in chosen], step=step, source=source, **tokens)


def means(values: Mapping[str, Rows], masks: Rows, rows: Sequence[int]) -> dict[str, list[Any]]:
    """Return means over the tokens that count in the loss; each of the rows has some."""
    counted = {row: masks[row].bool() for row in rows}
    found: dict[str, list[Any]] = {}
    if "advantages" in values:
        advantages = values["advantages"]
        found["advantage"] = [advantages[row][counted[row]].mean().item() for row in rows]
    if {"old_log_probs", "rollout_log_probs"} <= values.keys():
        pairs = zip(values["old_log_probs"], values["rollout_log_probs"], strict=True)
        apart = [(trainer - engine).abs() for trainer, engine in pairs]
        found["logprob_diff_mean"] = [apart[row][counted[row]].mean().item() for row in rows]
        found["logprob_diff_max"] = [apart[row][counted[row]].max().item() for row in rows]
    return found


def in_memory(tensors: Sequence[torch.Tensor]) -> Rows:
    """Return copies in the CPU's memory, with one transfer for all of them."""
    import torch

    sizes = [len(one) for one in tensors]
    whole = torch.cat([one.detach().float() for one in tensors]).cpu()
    return list(torch.split(whole, sizes))
