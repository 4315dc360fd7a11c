"""verl as a system, whose seams the modules of this package declare."""

from __future__ import annotations

from localtrace.trainer_hooks.seams import Plugin, System

TRACE_ID_KEY = "localtrace_trace_id"
"""Key of the trace id in verl's data: a column of V0's batches, elsewhere in `extra_fields`."""
AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"
VERL = System(
    "verl",
    "verl",
    ("0.6.1", "0.7.0", "0.7.1", "0.8.0", "0.9.0", "0.9.1"),
    Plugin(
        "verl.plugins",
        "VERL_USE_EXTERNAL_PLUGINS",
        "localtrace.trainer_hooks.verl",
        since=(0, 9),
        modules="VERL_USE_EXTERNAL_MODULES",
        records_with="actor_rollout_ref.rollout.trace.backend=localtrace, before 0.7 also with "
        "actor_rollout_ref.rollout.mode=async",
    ),
)
