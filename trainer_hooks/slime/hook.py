"""The functions that slime and miles call, each named by one of their options.

They look at what they are given and change nothing. An error inside them is counted as a loss and
does not reach the trainer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from localtrace.trainer_hooks.environment import record_this_process, run_id_of_ray_job, say_once
from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.slime.batches import (
    record_batch,
    record_evaluation,
    record_training_rollout,
)
from localtrace.trainer_hooks.tokenizer import keep_tokenizer_file

_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"
"""slime's own rollout: all samples that it has generated and left out by its end, it drops."""
_noted: dict[int | None, list[Any]] = {}
"""Samples generated so far for the rollout under way, by its id."""


def log_rollout_data(
    rollout_id: int,
    args: Any,
    samples: Sequence[Any],
    rollout_extra_metrics: Mapping[str, Any] | None = None,
    rollout_time: float | None = None,
) -> bool:
    """Record the samples of a training rollout: `--custom-rollout-log-function-path`.

    Returns False, so that the trainer goes on with its own logging.

    Raises:
        CannotRecord: recording cannot start, and LOCALTRACE_REQUIRED is set.
    """
    noted = _noted.pop(rollout_id, [])
    if _start_recording(args, "rollout"):
        record_training_rollout(
            rollout_id, args, samples, noted, rollout_extra_metrics, rollout_time
        )
    return False


def log_eval_rollout_data(
    rollout_id: int,
    args: Any,
    data: Mapping[str, Mapping[str, Any]],
    extra_metrics: Mapping[str, Any] | None = None,
) -> bool:
    """Record the samples of an evaluation: `--custom-eval-rollout-log-function-path`.

    Returns False, so that the trainer goes on with its own logging.

    Raises:
        CannotRecord: recording cannot start, and LOCALTRACE_REQUIRED is set.
    """
    if _start_recording(args, "rollout"):
        record_evaluation(rollout_id, args, data, extra_metrics)
    return False


def note_sample(
    args: Any, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False
) -> None:
    """Note a generated sample: `--rollout-sample-hook-path`, which only slime has.

    If it is not in the batch in the end, `log_rollout_data` records it as filtered.
    """
    drops = getattr(args, "rollout_function_path", None) == _ROLLOUT_FUNCTION
    if evaluation or not drops or getattr(args, "partial_rollout", False):
        return
    if rollout_id not in _noted:
        _noted.clear()
    _noted.setdefault(rollout_id, []).append(sample)


def postprocess_rollout_data(
    args: Any, rollout_id: int | None = None, rollout_data: Mapping[str, Any] | None = None
) -> None:
    """Record advantages and the use of samples in training: `--rollout-data-postprocess-path`.

    Raises:
        CannotRecord: recording cannot start, and LOCALTRACE_REQUIRED is set.
    """
    if rollout_id is None or rollout_data is None:
        say_once(
            "advantages are not recorded: this trainer passes no data to "
            "--rollout-data-postprocess-path"
        )
    elif _has_results() and _start_recording(args, f"rank{os.environ.get('RANK', '')}"):
        record_batch(rollout_id, args, rollout_data)


@harmless
def _has_results() -> bool:
    """Return whether this rank of Megatron is the one that speaks for its samples."""
    from megatron.core import mpu

    return bool(
        mpu.is_pipeline_last_stage()
        and mpu.get_tensor_model_parallel_rank() == 0
        and mpu.get_context_parallel_rank() == 0
    )


def _start_recording(args: Any, worker: str) -> bool:
    run_id = run_id_of_ray_job()
    started = record_this_process(worker, who="slime", run_id=run_id, config=vars(args))
    keep_tokenizer_file(getattr(args, "hf_checkpoint", None))
    return started
