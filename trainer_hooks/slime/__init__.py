"""Functions that slime and miles call by their path, given as options of the training."""

from __future__ import annotations

from localtrace.trainer_hooks.seams import System
from localtrace.trainer_hooks.slime.hook import (
    log_eval_rollout_data,
    log_rollout_data,
    note_sample,
    postprocess_rollout_data,
)

_LOG_OPTIONS = ("--custom-rollout-log-function-path", "--custom-eval-rollout-log-function-path")
_SWITCH = f"add {_LOG_OPTIONS[0]} localtrace.trainer_hooks.slime.log_rollout_data to its options"
_FIELDS = (
    "tokens", "response_length", "loss_mask", "rollout_log_probs", "weight_versions", "status",
    "reward", "prompt", "index", "group_index", "remove_sample",
)  # fmt: skip
SLIME = System("slime", "slime", ("0.3.1 (commit 624b824a8)",), _SWITCH)
MILES = System("miles", "miles", ("0.1.0 (commit 31f1ca961)",), _SWITCH)
for _system in (SLIME, MILES):
    for _option in _LOG_OPTIONS:
        _system.needs(f"{_system.package}.utils.arguments", _option)
    _system.needs(f"{_system.package}.utils.types", "Sample", reads=_FIELDS)
SLIME.needs(
    "slime.utils.arguments",
    "--rollout-data-postprocess-path",
    without="advantages are not recorded: use 0.2.4 or later",
)
SLIME.needs(
    "slime.utils.arguments",
    "--rollout-sample-hook-path",
    without="groups that are left out are not recorded: use 0.3.1 or later",
)
SYSTEMS = (SLIME, MILES)
__all__ = [
    "log_eval_rollout_data",
    "log_rollout_data",
    "note_sample",
    "postprocess_rollout_data",
]
