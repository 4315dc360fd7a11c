"""The seams of NeMo-RL, and the modules that they are in."""

from __future__ import annotations

from localtrace.trainer_hooks.environment import is_asked_for, refuse
from localtrace.trainer_hooks.seams import Seams


def _lacks(place: str) -> None:
    if is_asked_for():
        refuse(
            f"this version of NeMo-RL has no {place} that the hook knows, so not all is recorded: "
            "localtrace doctor shows what it needs"
        )


NEMO_RL = Seams(_lacks)
ROLLOUTS = "nemo_rl.experience.rollouts"
MANAGER = "nemo_rl.experience.rollout_manager"
GRPO = "nemo_rl.algorithms.grpo"
LOGGER = "nemo_rl.utils.logger"
