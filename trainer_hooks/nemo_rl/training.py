"""The seams around NeMo-RL's training: steps, validation, metrics, and what was trained on."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
from localtrace.trainer_hooks.tokenizer import keep_tokenizer
from localtrace.trainer_hooks.training import padded, record_training

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
    named = _FILE.search(filename)
    columns = ("token_ids", "input_lengths", "generation_logprobs", "token_loss_mask")
    if named is not None and all(to_log.get(name) is not None for name in columns):
        _record_batch(int(named[1]), to_log)
    yield


def _record_batch(step: int, logged: Mapping[str, Any]) -> None:
    """Record the advantages, logprobs and fates of the rollouts of one step.

    Args:
        logged: NeMo-RL's columns, with one row per rollout.
    """
    import torch

    lengths = [int(length) for length in logged["input_lengths"]]
    columns = {
        name: [numbers(row)[:length] for row, length in zip(logged[name], lengths, strict=True)]
        for name in ("token_ids", "token_loss_mask", *_TOKEN_NAMES)
        if logged.get(name) is not None
    }
    contents = map(content_of, columns["token_ids"], columns["generation_logprobs"])
    ids = [trace_id_in_job("nemo_rl", content, _trained.next(content)) for content in contents]
    masks, weights = columns["token_loss_mask"], logged.get("sample_loss_mask")
    weights = [1.0] * len(ids) if weights is None else weights
    rows = [row for row, mask in enumerate(masks) if any(mask) and float(weights[row]) != 0.0]
    _record_left_out([ids[row] for row in range(len(ids)) if row not in rows], _MASKED)
    _record_left_out([trace_id for trace_id in training.waiting if trace_id not in ids], _LEFT_OUT)
    training.waiting.clear()
    if not rows:
        return
    starts = {row: [bool(counts) for counts in masks[row]].index(True) for row in rows}

    def response(name: str) -> torch.Tensor:
        return padded([torch.tensor(columns[name][row][starts[row] :]) for row in rows])

    # A trainer that skips the logprobs has only zeros for them.
    values = {
        name: response(key)
        for key, name in _TOKEN_NAMES.items()
        if key in columns and (key == "advantages" or any(map(any, columns[key])))
    }
    trained = [ids[row] for row in rows]
    counted, sizes = response("token_loss_mask"), [lengths[row] - starts[row] for row in rows]
    record_training(trained, values, counted, trained, sizes, None, SOURCE, step)


def _record_left_out(ids: list[str], reason: str) -> None:
    fates: dict[str, Any] = {"fate": ["filtered"] * len(ids), "fate_reason": [reason] * len(ids)}
    if ids:
        outcome(ids, step=None, source=SOURCE, **fates)
