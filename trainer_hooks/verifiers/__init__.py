"""Recording of verifiers' episodes: `record()` in every process that runs environments.

The modules `graph` and `facts` read traces, live ones and those of files alike. Importing this
package loads nothing of verifiers.
"""

from __future__ import annotations

from localtrace.trainer_hooks.verifiers.hook import VERIFIERS, record
from localtrace.trainer_hooks.verifiers.prime_rl import PRIME_RL

__all__ = ["record"]
SYSTEMS = (VERIFIERS, PRIME_RL)
