"""The V1 trainer: the same outcomes as V0's, with trace ids read from the transfer queue.

A row of V1 has a key `{uid}_{session}_{output}`, and its trace id is in its `extra_fields`. Padding
rows copy those fields and are left out. If a session has several outputs, outcomes of the last one
have plain names; those of the others are named `NAME/output_N`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.seams import Part
from localtrace.trainer_hooks.verl import job
from localtrace.trainer_hooks.verl.system import TRACE_ID_KEY, VERL
from localtrace.trainer_hooks.verl.trainer import BYPASS_KEY, take_generated
from localtrace.trainer_hooks.verl.trainer_outcomes import (
    is_wanted,
    record_advantages,
    record_fate,
    record_rewards,
    record_trained,
)

_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_BUFFER = "verl.trainer.ppo.v1.replay_buffer"
_LOST = "outcomes of the V1 trainer are not recorded; before 0.9 there is no such trainer"
_SURPLUS = ("filtered", "enough groups were there without it")
_REASONS = (
    ("stale", "older than max_off_policy_threshold allows"),
    ("filtered", "all its rewards are equal"),
    ("failed", "a rollout of the group failed"),
)
"""Fate and reason of each set of groups that verl evicts, in verl's order."""

_now: tuple[Any, Any] | None = None
"""The trainer and the batch whose advantages are being computed."""
_fates: dict[str, tuple[str, str]] = {}
"""Fate and reason, by uid, of the groups that are being evicted."""
_known: dict[str, str] = {}
"""Trace ids, by key, of the batch that is trained on."""
_not_counted: set[str] = set()
"""Keys of that batch whose rows have no token in the loss."""


# -- trace ids -----------------------------------------------------------------------------


def _trace_ids(queue: Any, partition: str, keys: Iterable[str]) -> dict[str, str]:
    """Return the trace ids by key, for the keys that have one."""
    keys = list(keys)
    if not keys:
        return {}
    data = queue.kv_batch_get(keys=keys, partition_id=partition, select_fields=["extra_fields"])
    return _ids_of(keys, data)


def _ids_of(keys: list[str], data: Any) -> dict[str, str]:
    found = {}
    for key, extra in zip(keys, list(data["extra_fields"]), strict=True):
        extra = getattr(extra, "data", extra)
        trace_id = extra.get(TRACE_ID_KEY) if isinstance(extra, dict) else None
        if trace_id:
            found[key] = str(trace_id)
    return found


def _real_keys(batch: Any) -> list[str]:
    return [
        key
        for key, tag in zip(batch.keys, batch.tags, strict=True)
        if not tag.get("is_padding", False)
    ]


def _session(key: str) -> tuple[str, int]:
    session, _, output = key.rpartition("_")
    return session, int(output)


def _by_output(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the keys by the suffix of their outcomes' names."""
    last: dict[str, int] = {}
    for key in keys:
        session, output = _session(key)
        last[session] = max(output, last.get(session, output))
    found = defaultdict(list)
    for key in keys:
        session, output = _session(key)
        found["" if output == last[session] else f"/output_{output}"].append(key)
    return found


# -- advantages, and what was trained on ---------------------------------------------------


@VERL.around(_TRAINER, "PPOTrainer._compute_advantage", without=_LOST)
def _computing(self: Any, batch: Any) -> Part:
    global _now
    _now = (self, batch)
    try:
        yield
    finally:
        _now = None


@VERL.around("verl.trainer.ppo.v1.utils", "compute_advantage_for_multi_trajectories", without=_LOST)
def _record_advantages() -> Part:
    data = yield
    if not is_wanted() or _now is None:
        return
    trainer, batch = _now
    generated = take_generated(data)
    counted = data.batch["response_mask"].any(dim=-1).tolist()
    _not_counted.clear()
    _not_counted.update(key for key, has in zip(batch.keys, counted, strict=True) if not has)
    _known.clear()
    _known.update(_trace_ids(_queue(), batch.partition_id, _real_keys(batch)))
    uids = data.non_tensor_batch["uid"]
    recomputed = not job.select(trainer.config, BYPASS_KEY)
    for suffix, keys in _by_output(_known).items():
        for step, launched in _by_step(batch, keys).items():
            ids = [_known[key] if key in launched else None for key in batch.keys]
            record_advantages(
                data.batch,
                ids,
                uids,
                step=step,
                recomputed=recomputed,
                generated=generated,
                suffix=suffix,
            )


def _by_step(batch: Any, keys: Iterable[str]) -> dict[int | None, set[str]]:
    tags = dict(zip(batch.keys, batch.tags, strict=True))
    found = defaultdict(set)
    for key in keys:
        found[tags[key].get("global_steps")].add(key)
    return found


@VERL.around(_TRAINER, "PPOTrainer._update_actor", without=_LOST)
def _record_trained(self: Any, batch: Any) -> Part:
    yield
    if not is_wanted():
        return
    keys = _real_keys(batch)
    if not all(key in _known for key in keys):
        _known.update(_trace_ids(_queue(), batch.partition_id, keys))
    for step, launched in _by_step(batch, (key for key in keys if key in _known)).items():
        rows = ((_known[key], key not in _not_counted) for key in keys if key in launched)
        record_trained(rows, step=step, trained_step=self.global_steps)
    _known.clear()


# -- groups that are not trained on --------------------------------------------------------


@VERL.around(_BUFFER, "ReplayBuffer._evict_terminal_groups", without=_LOST)
def _note_reasons(eviction_reasons: Any) -> Part:
    # Reversed, so that the first of several reasons wins.
    for fate, uids in reversed(list(zip(_REASONS, eviction_reasons, strict=False))):
        _fates.update(dict.fromkeys(uids, fate))
    try:
        yield
    finally:
        _fates.clear()


@VERL.around(_BUFFER, "ReplayBuffer._clear_groups", without=_LOST)
def _record_fates(self: Any, partition_id: str, uids: Any) -> Part:
    if not is_wanted() or partition_id == "val" or not uids:
        return
    found = self.partitions[partition_id]
    keys = [key for key in found if key.split("_")[0] in uids]
    by_fate = defaultdict(list)
    for key, trace_id in _trace_ids(_queue(), partition_id, keys).items():
        step = found[key].get("global_steps")
        by_fate[_fates.get(key.split("_")[0], _SURPLUS), step].append(trace_id)
    for ((fate, reason), step), ids in by_fate.items():
        record_fate(ids, fate, step=step, fate_reason=reason)
    yield


# -- rewards that the trainer reads or writes ----------------------------------------------


class _WatchedQueue:
    """A proxy of the transfer queue for the trainer's module. It records scores on their way."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def kv_batch_get(self, *args: Any, **kwargs: Any) -> Any:
        data = self._queue.kv_batch_get(*args, **kwargs)
        _note_validation(data, **kwargs)
        return data

    def kv_batch_put(self, *args: Any, **kwargs: Any) -> Any:
        result = self._queue.kv_batch_put(*args, **kwargs)
        _note_rewards(self._queue, **kwargs)
        return result


@VERL.on_import(_TRAINER, "tq", without=_LOST)
def _watch(module: ModuleType) -> None:
    module.tq = _WatchedQueue(module.tq)  # type: ignore[attr-defined]


def _queue() -> Any:
    import transfer_queue

    return transfer_queue


@harmless
def _note_validation(
    data: Any, keys: Any = (), partition_id: Any = None, select_fields: Any = (), **_: Any
) -> None:
    wanted = {"rm_scores", "extra_fields"} <= set(select_fields or ())
    if wanted and partition_id == "val" and is_wanted():
        _record_scores(_ids_of(list(keys), data), list(keys), data, "verl.validation")


@harmless
def _note_rewards(
    queue: Any, keys: Any = (), partition_id: Any = None, fields: Any = None, **_: Any
) -> None:
    if not is_wanted() or fields is None or "rm_scores" not in set(fields.keys()):
        return
    keys = list(keys)
    _record_scores(_trace_ids(queue, partition_id, keys), keys, fields, "reward_model")


def _record_scores(ids: dict[str, str], keys: list[str], data: Any, source: str) -> None:
    scores = data["rm_scores"]
    if scores.is_nested:
        scores = scores.to_padded_tensor(0.0)
    last = set(_by_output(keys)[""])
    trace_ids = [ids.get(key) if key in last else None for key in keys]
    record_rewards(scores, trace_ids, step=None, source=source)
