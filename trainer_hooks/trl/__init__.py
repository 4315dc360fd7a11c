"""Recording of TRL's GRPO and RLOO trainers: `record(trainer)` before `trainer.train()`."""

from __future__ import annotations

from localtrace.trainer_hooks.trl.hook import record
from localtrace.trainer_hooks.trl.job import TRL

__all__ = ["record"]
SYSTEMS = (TRL,)
