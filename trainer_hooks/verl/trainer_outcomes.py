"""Outcomes from a trainer's batch: advantages, rewards and fates, joined by trace id.

Values are computed for many rows at once. Only groups that are chosen for per-token values are read
row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from localtrace.record import active
from localtrace.record.session import outcome
from localtrace.trainer_hooks.environment import hook_settings, is_chosen

if TYPE_CHECKING:
    import torch

SOURCE = "verl.trainer"
NOT_COUNTED = "no token of it counts: verl rejected all of them, or none was generated"
PER_TOKEN_NAMES = ("advantages", "old_log_probs", "rollout_log_probs", "ref_log_prob")


def is_wanted() -> bool:
    """Return whether this process records outcomes of training."""
    return active.recorder is not None and hook_settings().trainer_outcomes


def record_advantages(
    batch: Mapping[str, torch.Tensor],
    trace_ids: Sequence[str | None],
    uids: Sequence[Any],
    *,
    step: int | None,
    recomputed: bool,
    generated: torch.Tensor | None = None,
    suffix: str = "",
) -> None:
    """Record advantages, differences of logprobs and per-token values of each row.

    Args:
        batch: tensors of shape (rows, response length), right-padded: response_mask (1 where the
            model generated the token and it counts for the loss), advantages, and where they exist
            old_log_probs, rollout_log_probs, ref_log_prob.
        trace_ids: trace id of each row. Rows with None or a repeated id are left out.
        uids: group of each row.
        step: step at which the trajectories were launched.
        recomputed: whether the trainer computed old_log_probs itself. Only then are they compared
            with the engine's.
        generated: tensor of the same shape, 1 where the model generated the token; by default
            response_mask.
        suffix: text appended to every outcome's name.
    """
    rows, present = first_rows(trace_ids), set(batch.keys())
    if not rows:
        return
    generated = batch["response_mask"] if generated is None else generated
    counted = batch["response_mask"][rows].bool()
    values: dict[str, list[Any]] = {"advantage": _mean(batch["advantages"][rows], counted)}
    if recomputed and {"old_log_probs", "rollout_log_probs"} <= present:
        mask = generated[rows].bool()
        apart = (batch["old_log_probs"][rows] - batch["rollout_log_probs"][rows]).abs()
        largest = apart.masked_fill(~mask, 0.0).amax(dim=-1)
        values["logprob_diff_mean"] = _mean(apart, mask)
        values["logprob_diff_max"] = _known(largest, mask)
    _record([str(trace_ids[row]) for row in rows], values, step, suffix)
    share = hook_settings().trainer_tokens
    chosen = [row for row in rows if is_chosen(uids[row], share)]
    if not chosen:
        return
    # Up to the last generated token. Padding or a tool's answer follows it.
    length = generated.shape[-1]
    ends = [
        length - int(flipped.argmax()) if bool(flipped.any()) else 0
        for flipped in generated[chosen].int().flip(-1)
    ]
    tensors = {name: batch[name] for name in PER_TOKEN_NAMES if name in present}
    # The mask tells which tokens the values belong to, even where verl truncated the response.
    tokens = {
        name: [tensor[row, :end].tolist() for row, end in zip(chosen, ends, strict=True)]
        for name, tensor in {**tensors, "response_mask": generated}.items()
    }
    _record([str(trace_ids[row]) for row in chosen], tokens, step, suffix)


def _mean(values: torch.Tensor, mask: torch.Tensor) -> list[float | None]:
    totals = values.double().masked_fill(~mask, 0.0).sum(dim=-1)
    return _known(totals / mask.sum(dim=-1).clamp(min=1), mask)


def _known(values: torch.Tensor, mask: torch.Tensor) -> list[float | None]:
    """Return the values, with None for rows whose mask is empty."""
    pairs = zip(values.tolist(), mask.any(dim=-1).tolist(), strict=True)
    return [value if has else None for value, has in pairs]


def record_rewards(
    scores: torch.Tensor, trace_ids: Sequence[str | None], *, step: int | None, source: str
) -> None:
    """Record rewards that were computed after the rollout.

    Args:
        scores: tensor of shape (rows, response length). A row's reward is its sum.
    """
    rows = first_rows(trace_ids)
    if rows:
        rewards = scores[rows].sum(dim=-1).tolist()
        outcome([str(trace_ids[row]) for row in rows], step=step, source=source, reward=rewards)


def record_fate(
    trace_ids: Sequence[str], fate: str, *, step: int | None = None, **values: Any
) -> None:
    """Record one fate, and further values, for all of these trajectories."""
    ids = list(dict.fromkeys(trace_ids))
    if ids:
        named = {name: [value] * len(ids) for name, value in {"fate": fate, **values}.items()}
        outcome(ids, step=step, source=SOURCE, **named)


def record_trained(
    rows: Iterable[tuple[str | None, bool]], *, step: int | None, trained_step: int
) -> None:
    """Record which trajectories an update of the actor used.

    Args:
        rows: trace id of each row, and whether any of its tokens counted in the loss.
        step: step at which the trajectories were launched.
        trained_step: step of the update.
    """
    counted: dict[str, bool] = {}
    for trace_id, counts in rows:
        if trace_id:
            counted[trace_id] = counts or counted.get(trace_id, False)
    trained = [trace_id for trace_id, counts in counted.items() if counts]
    left = [trace_id for trace_id, counts in counted.items() if not counts]
    record_fate(trained, "trained", step=step, trained_step=trained_step)
    record_fate(left, "filtered", step=step, fate_reason=NOT_COUNTED)


def first_rows(trace_ids: Sequence[str | None]) -> list[int]:
    """Return the index of the first row of each trace id. Padding repeats rows."""
    found: dict[str, int] = {}
    for row, trace_id in enumerate(trace_ids):
        if trace_id:
            found.setdefault(trace_id, row)
    return list(found.values())


def _record(
    trace_ids: list[str], values: Mapping[str, list[Any]], step: int | None, suffix: str
) -> None:
    named = {f"{name}{suffix}": items for name, items in values.items()}
    outcome(trace_ids, step=step, source=SOURCE, **named)
