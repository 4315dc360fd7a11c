"""The seams around NeMo-RL's training: steps, validation, metrics, and what was trained on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from localtrace.record.session import outcome
from localtrace.trainer_hooks.environment import record_numbers, trace_id_in_job
from localtrace.trainer_hooks.nemo_rl.job import (
    GRPO,
    LOGGER,
    NEMO_RL,
    OLDER,
    start_recording,
    training,
    validated_step,
)
from localtrace.trainer_hooks.nemo_rl.samples import Occurrences, content_of, numbers
from localtrace.trainer_hooks.seams import Part
from localtrace.trainer_hooks.token_means import record_training
from localtrace.trainer_hooks.tokenizer import keep_tokenizer

SOURCE = "nemo_rl.trainer"
_LEFT_OUT = "it is not in the batch that was trained on, as after dynamic sampling"
_MASKED = "its loss multiplier is 0, or no token of it counts"
_FILE = re.compile(r"train_data_step(\d+)\.jsonl")
_TOKEN_NAMES = {
    "advantages": "advantages",
    "prev_logprobs": "old_log_probs",
    "generation_logprobs": "rollout_log_probs",
}
"""Names of outcomes, by NeMo-RL's columns with one number per token."""
_trained = Occurrences()


@NEMO_RL.around(GRPO, "grpo_train")
def _train(master_config: Any, grpo_save_state: Any, tokenizer: Any = None) -> Part:
    """Follow a training loop, which stops where recording is required and cannot start."""
    if start_recording(getattr(master_config, "model_dump", lambda: None)()):
        keep_tokenizer(tokenizer)
    training.step = int(grpo_save_state.total_steps) + 1
    try:
        yield
    finally:
        training.step = None


NEMO_RL.around(GRPO, "async_grpo_train", without=OLDER)(_train)


@NEMO_RL.around(GRPO, "validate", without="validation is not told from training")
def _validate(step: int) -> Part:
    outer = validated_step.set(int(step))
    try:
        yield
    finally:
        validated_step.reset(outer)


@NEMO_RL.around(LOGGER, "Logger.log_metrics")
def _log(metrics: Any, step: Any, prefix: Any = "", step_finished: bool = False) -> Part:
    yield
    record_numbers(metrics, int(step), f"{prefix}/" if prefix else "")
    if step_finished and training.step is not None:
        training.step = int(step) + 1


@NEMO_RL.around(LOGGER, "Logger.log_batched_dict_as_jsonl")
def _log_batch(to_log: Any, filename: str) -> Part:
    """Record what a step has trained on, which NeMo-RL logs with the tokens of each rollout."""
    if training.step is None:
        return  # a trainer whose rollouts are not recorded
    found = _FILE.search(filename)
    columns = {"token_ids", "input_lengths", "generation_logprobs", "token_loss_mask"}
    if found is not None and all(to_log.get(name) is not None for name in columns):
        _record_batch(int(found[1]), to_log)
    yield


def _record_batch(step: int, logged: Mapping[str, Any]) -> None:
    """Record the advantages, logprobs and fates of the rollouts of one step.

    Args:
        logged: NeMo-RL's columns, with one row per rollout.
    """
    import torch

    lengths = [int(one) for one in logged["input_lengths"]]
    ids = [_trace_id(logged, row, length) for row, length in enumerate(lengths)]
    counted = [_row(logged["token_loss_mask"], row, length) for row, length in enumerate(lengths)]
    starts = [next((at for at, one in enumerate(mask) if one), 0) for mask in counted]
    weights = logged.get("sample_loss_mask")
    weights = [1.0] * len(ids) if weights is None else weights
    rows = [row for row, mask in enumerate(counted) if any(mask) and float(weights[row]) != 0.0]
    known = set(ids)
    _record_left_out([one for row, one in enumerate(ids) if row not in rows], _MASKED)
    _record_left_out([one for one in training.waiting if one not in known], _LEFT_OUT)
    training.waiting.clear()
    # A trainer that skips the logprobs has only zeros for them.
    values = {
        name: [torch.tensor(_row(logged[key], row, lengths[row])[starts[row] :]) for row in rows]
        for key, name in _TOKEN_NAMES.items()
        if logged.get(key) is not None and (key == "advantages" or any(map(any, logged[key])))
    }
    masks = [torch.tensor(counted[row][starts[row] :]) for row in rows]
    chosen = [ids[row] for row in rows]
    if chosen:
        record_training(chosen, values, masks, chosen, step=None, trained_step=step, source=SOURCE)


def _record_left_out(ids: list[str], reason: str) -> None:
    fates: dict[str, Any] = {"fate": ["filtered"] * len(ids), "fate_reason": [reason] * len(ids)}
    if ids:
        outcome(ids, step=None, source=SOURCE, **fates)


def _trace_id(logged: Mapping[str, Any], row: int, length: int) -> str:
    token_ids = _row(logged["token_ids"], row, length)
    content = content_of(token_ids, _row(logged["generation_logprobs"], row, length))
    return trace_id_in_job("nemo_rl", content, _trained.next(content))


def _row(column: Sequence[Any], row: int, length: int) -> list[Any]:
    return numbers(column[row])[:length]
