"""Recording of verifiers' episodes: `record()` in every process that runs environments.

The modules `graph` and `facts` read traces, live ones and those of files alike. Importing this
package loads nothing of verifiers.
"""

from __future__ import annotations

from localtrace.trainer_hooks.seams import System
from localtrace.trainer_hooks.verifiers.hook import PARAMETERS, record

VERIFIERS = System(
    "verifiers",
    "verifiers",
    ("0.4.0",),
    "call localtrace.trainer_hooks.verifiers.record() in the module of your taskset",
)
VERIFIERS.needs("verifiers.v1.env", "Env.run_episode", reads=PARAMETERS)
VERIFIERS.needs("verifiers.v1.trace", "Trace.notify")
VERIFIERS.needs(
    "verifiers.v1.trace", "Trace", reads=("id", "nodes", "calls", "rewards", "errors", "ok")
)
VERIFIERS.needs(
    "verifiers.v1.graph",
    "MessageNode",
    reads=("parent", "message", "sampled", "token_ids", "mask", "logprobs"),
)
PRIME_RL = System(
    "prime-rl",
    "prime_rl.monitors",  # prime_rl itself has no file
    ("commit 559b44772",),
    distributions=("prime-rl",),
)
for _name in ("MONITORS", "setup", "log"):
    PRIME_RL.needs("prime_rl.monitors", _name)
for _name in ("log_metrics", "log_episodes", "finalize"):
    PRIME_RL.needs("prime_rl.monitors.base", f"Monitor.{_name}")
SYSTEMS = (VERIFIERS, PRIME_RL)
__all__ = ["record"]
