"""NeMo-RL as a system, and the modules that its hook enters."""

from __future__ import annotations

from localtrace.trainer_hooks.ray.job import HOOK_VARIABLE
from localtrace.trainer_hooks.seams import System, Variable

NEMO_RL = System(
    "nemo_rl",
    "nemo_rl",
    ("0.6.0 (commit 7ea279abf)",),
    Variable(
        HOOK_VARIABLE,
        "localtrace.trainer_hooks.nemo_rl.runtime_env_hook",
        "call localtrace.trainer_hooks.nemo_rl.install() in your script",
    ),
    ("nemo-rl",),
)
ROLLOUTS = "nemo_rl.experience.rollouts"
MANAGER = "nemo_rl.experience.rollout_manager"
GRPO = "nemo_rl.algorithms.grpo"
LOGGER = "nemo_rl.utils.logger"
OLDER = "rollouts in processes of their own are not recorded by this version"
