"""The switch of the hook: one trainer is recorded from now on."""

from __future__ import annotations

import weakref
from typing import Any

from localtrace.errors import ConfigError
from localtrace.trainer_hooks.environment import refuse
from localtrace.trainer_hooks.trl import async_grpo, grpo
from localtrace.trainer_hooks.trl.job import TRL, start_recording

_recorded: weakref.WeakSet[Any] = weakref.WeakSet()


def record(trainer: Any) -> None:
    """Record what one of TRL's GRPO or RLOO trainers generates, scores and trains on.

    Call it in every process of the job, after making the trainer and before `train()` or
    `evaluate()`. The main process must record already (`localtrace.init`) or have LOCALTRACE_STORE
    set; the others record into the same run. Otherwise one line says that nothing is recorded, and
    so it does for a trainer that lacks methods which the hook needs.

    Raises:
        CannotRecord: recording is impossible, and LOCALTRACE_REQUIRED is set.
    """
    trainers = async_grpo if hasattr(trainer, "rollout_queue") else grpo
    try:
        TRL.replacements(trainer, trainers.KIND)
    except ConfigError as error:
        refuse(str(error))
        return
    if trainer not in _recorded and start_recording(trainer):
        _recorded.add(trainer)
        trainers.begin(trainer)
        TRL.enter(trainer, trainers.KIND)
