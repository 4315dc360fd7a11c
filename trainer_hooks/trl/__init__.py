"""Recording of TRL's GRPO trainer: `record(trainer)` before `trainer.train()`."""

from __future__ import annotations

from localtrace.trainer_hooks.trl.hook import TRL, record

__all__ = ["record"]
SYSTEMS = (TRL,)
