"""The V0 trainer: advantages, log-probabilities, validation scores, and what was trained on.

V0's batches carry the trace ids as a column, through balancing, filtering and padding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from localtrace.trainer_hooks.seams import Part
from localtrace.trainer_hooks.verl import job
from localtrace.trainer_hooks.verl.keys import TRACE_ID_KEY
from localtrace.trainer_hooks.verl.seams import after, around
from localtrace.trainer_hooks.verl.trainer_outcomes import (
    SOURCE,
    is_wanted,
    record_advantages,
    record_rewards,
    record_trained,
)

if TYPE_CHECKING:
    import torch

_MODULE = "verl.trainer.ppo.ray_trainer"
BYPASS_KEY = "algorithm.rollout_correction.bypass_mode"
_trainer: Callable[[], Any] = lambda: None  # noqa: E731  (a weak reference, once there is one)
_corrected: tuple[Callable[[], Any], torch.Tensor] | None = None
"""The last batch in which verl rejected tokens, and its response mask from before."""


@after(_MODULE, "RayPPOTrainer.__init__")
def _remember(self: Any) -> None:
    global _trainer
    _trainer = weakref.ref(self)


@around(
    "verl.trainer.ppo.rollout_corr_helper",
    "compute_rollout_correction_and_add_to_batch",
    optional=True,
)
def _remember_generated(batch: Any) -> Part:
    global _corrected
    _corrected = None
    generated = batch.batch["response_mask"] if is_wanted() else None
    result = yield
    if generated is not None:
        _corrected = (weakref.ref(result[0], _forget), generated)


def _forget(batch: weakref.ref[Any]) -> None:
    global _corrected
    if _corrected is not None and _corrected[0] is batch:
        _corrected = None


def take_generated(data: Any) -> torch.Tensor | None:
    """Return a batch's response mask from before verl rejected tokens; None if unchanged."""
    global _corrected
    corrected, _corrected = _corrected, None
    return corrected[1] if corrected is not None and corrected[0]() is data else None


@after(_MODULE, "compute_advantage")
def _record_advantages(result: Any) -> None:
    data = result
    ids = _trace_ids(data)
    if ids is None:
        return
    trainer = _trainer()
    step = _launch_step(trainer)
    bypass = job.select(getattr(trainer, "config", None), BYPASS_KEY)
    uids = data.non_tensor_batch.get("uid", ids)
    generated = take_generated(data)
    record_advantages(data.batch, ids, uids, step=step, recomputed=not bypass, generated=generated)
    if "rm_scores" not in set(data.batch.keys()):
        record_rewards(data.batch["token_level_scores"], ids, step=step, source=SOURCE)


@after(_MODULE, "RayPPOTrainer._update_actor", optional=True)
def _record_trained(self: Any, batch: Any) -> None:
    ids = _trace_ids(batch)
    if ids is not None:
        step = _launch_step(self)
        counted = batch.batch["response_mask"].any(dim=-1).tolist()
        rows = zip(ids, counted, strict=True)
        record_trained(rows, step=step, trained_step=self.global_steps)


@after(_MODULE, "RayPPOTrainer._compute_reward_colocate", optional=True)
def _record_late_rewards(result: Any, self: Any, batch: Any) -> None:
    ids = _trace_ids(batch)
    if ids is not None:
        step = _launch_step(self)
        record_rewards(result.batch["rm_scores"], ids, step=step, source="reward_model")


@after("verl.trainer.ppo.reward", "extract_reward", optional=True)
def _record_validation(result: Any, batch: Any) -> None:
    ids = _trace_ids(batch)
    if ids is not None and batch.meta_info.get("validate"):
        step = _launch_step(_trainer())
        record_rewards(result[0], ids, step=step, source="verl.validation")


def _trace_ids(batch: Any) -> list[str | None] | None:
    """Return the trace id of each row; None if nothing is to be recorded."""
    column = batch.non_tensor_batch.get(TRACE_ID_KEY)
    return list(column) if column is not None and is_wanted() else None


def _launch_step(trainer: Any) -> int | None:
    """Return the step that launched a batch's rollouts; None if rollouts run ahead of training."""
    module = type(trainer).__module__
    ahead = trainer is None or "async" in module or "off_policy" in module
    return None if ahead else trainer.global_steps
