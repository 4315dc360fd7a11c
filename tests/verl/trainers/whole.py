"""A step of V0's and of V1's trainer.

Everything that verl computes, keeps or puts into its queue comes out in a form that is equal only
where it is the same to the last bit. Without this hook nothing of it is imported.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transfer_queue
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from tests.verl.trainers import in_memory, sessions, v0
from tests.verl.trainers.batches import make_batch


def run() -> dict[str, Any]:
    """The steps that both trainers take."""
    queue = in_memory.Queue()
    functions = {name: getattr(queue, name) for name in in_memory.FUNCTIONS}
    with (
        mock.patch.object(uuid, "uuid4", side_effect=map(_uuid, itertools.count())),
        mock.patch.multiple(transfer_queue, **functions),
    ):
        return exact({"v0": _run_v0(), "v1": _run_v1(queue), "queue": vars(queue)})


def _uuid(number: int) -> uuid.UUID:
    return uuid.UUID(int=number)


def _run_v0() -> dict[str, Any]:
    trainer = v0.Trainer()
    results: dict[str, Any] = {}
    for estimator in ("grpo", "gae"):
        batch = v0.everything(make_batch())
        results[f"rewards {estimator}"] = trainer._compute_reward_colocate(batch)
        corrected, metrics = compute_rollout_correction_and_add_to_batch(batch, v0.REJECTION)
        batch = v0.compute(corrected, estimator)
        results[estimator] = batch, metrics, trainer._update_actor(batch)
        results[f"given to the actor {estimator}"] = trainer.actor_rollout_wg.data
    results["validation"] = [v0.validate(trainer, late) for late in (False, True)]
    return results


def _run_v1(queue: in_memory.Queue) -> dict[str, Any]:
    rollouts = sessions.Rollouts(queue)
    trainer = sessions.Trainer(queue, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.8_1.5")
    results: dict[str, Any] = {"asynchronous": _sample(rollouts, ReplayBufferAsync, "reward")}
    batch, _ = results["synchronous"] = _sample(rollouts, ReplayBuffer, "acc")
    metrics: dict[str, Any] = {}
    batch = trainer._compute_reward_colocate(batch, metrics)
    batch = trainer.compute(batch)
    results["update"] = trainer._update_actor(batch, metrics), metrics
    results["validation"] = validate(trainer, rollouts, scored_late=True)
    return results


def _sample(rollouts: sessions.Rollouts, kind: Any, metric: str) -> Any:
    """A batch of the buffer from groups that are stale, failed, or have equal rewards."""
    name = kind.__name__.lower()
    steps = itertools.count(sessions.STEP - 1)

    def refill(count: int) -> None:
        for _ in range(count):
            step = next(steps)
            rollouts.group(f"{name}more{step}", (1.0, 0.5), step=step, outputs=2)

    rollouts.group(f"{name}stale", (1.0, 0.5), step=sessions.STEP - 5)
    rollouts.group(f"{name}equal", (0.5, 0.5))
    if kind is ReplayBufferAsync:
        rollouts.group(f"{name}failed", (1.0,), status="failure")
    made = buffer(kind, refill, filter_groups_metric=metric, train_batch_size=4, gen_batch_size=1)
    return made.sample(global_steps=sessions.STEP, partition_id="train", batch_size=2)


def buffer(kind: Any, refill: Callable[[int], Any], **how: Any) -> Any:
    """verl's replay buffer, which does not wait between its looks at the queue."""
    mode = "sync" if kind is ReplayBuffer else "separate_async"
    settings = {"max_off_policy_threshold": 2, "max_off_policy_strategy": "drop", **how}
    return kind(mode, {}, sampler_kwargs={}, poll_interval=0.0, refill_fn=refill, **settings)


def validate(
    trainer: sessions.Trainer, rollouts: sessions.Rollouts, scored_late: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """verl's validation of two batches of two prompts, two rollouts of two outputs each.

    Returns:
        verl's metrics, and what the trajectories' scores must be, by trace id.
    """
    expected: dict[str, float] = {}

    def generate_sequences(batch: TensorDict) -> None:
        for at, uid in enumerate(batch["uid"]):
            rewards = (None, None) if scored_late else (at + 0.25, at + 0.5)
            rollouts.group(str(uid), rewards, outputs=2, partition="val")
            expected.update({f"{uid}.{session}": reward for session, reward in enumerate(rewards)})
        if scored_late:
            expected.update(sessions.scores_of(rollouts.queue, "val"))

    columns = {
        "raw_prompt": [[{"role": "user", "content": "?"}]] * 2,
        "data_source": ["gsm8k"] * 2,
        "index": [0, 1],
    }
    trainer.agent_loop_manager = SimpleNamespace(generate_sequences=generate_sequences)
    trainer.replay_buffer = buffer(ReplayBuffer, lambda _: None)
    if not scored_late:
        trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=["one"])
    trainer.val_dataloader = [
        {name: np.array(column, dtype=object) for name, column in columns.items()} for _ in range(2)
    ]
    return trainer._validate(), expected


def exact(value: Any) -> Any:
    """Equal for values that are the same to the last bit, and of the same type."""
    if isinstance(value, torch.Tensor):
        rows = list(value.unbind()) if value.is_nested else [value]
        return [(str(row.dtype), tuple(row.shape), row.numpy().tobytes()) for row in rows]
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, exact(value.tolist())
    if isinstance(value, DataProto):
        return exact([value.batch, value.non_tensor_batch, value.meta_info])
    if isinstance(value, TensorDict):
        return {name: exact(value.get(name)) for name in value.keys()}  # noqa: SIM118
    if isinstance(value, transfer_queue.KVBatchMeta):
        return exact(vars(value))
    if isinstance(value, Mapping):
        return {name: exact(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [exact(item) for item in value]
    if hasattr(value, "tolist") or hasattr(value, "data"):  # what stands for things in TensorDicts
        return exact(value.tolist() if hasattr(value, "tolist") else value.data)
    return type(value).__name__, repr(value)


def main(file: str) -> None:
    """Write down what came of it, and the modules of localtrace that are loaded then."""
    result = run()
    loaded = sorted(name for name in sys.modules if name.split(".")[0] == "localtrace")
    Path(file).write_bytes(pickle.dumps((result, loaded)))
