"""Recording of NeMo-RL's GRPO, by `install()` or by RAY_RUNTIME_ENV_HOOK."""

from __future__ import annotations

from localtrace.trainer_hooks.nemo_rl import rollouts, training
from localtrace.trainer_hooks.nemo_rl.job import install, runtime_env_hook
from localtrace.trainer_hooks.nemo_rl.places import NEMO_RL

SYSTEMS = (NEMO_RL,)
__all__ = ["install", "rollouts", "runtime_env_hook", "training"]
