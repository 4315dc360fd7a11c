"""verl's own agent-loop worker without its model."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop import agent_loop


class Worker(agent_loop.AgentLoopWorker):
    """Starts tracing as verl's worker does, and makes trajectories when told to."""

    def __init__(self, config: Any, *_: Any) -> None:
        trace = config.actor_rollout_ref.rollout.trace
        agent_loop.RolloutTraceConfig.init(
            trace.project_name, trace.experiment_name, trace.backend, False
        )
        self.made = 0

    def roll_out(self, count: int) -> int:
        """Make this many trajectories; give how many were made so far."""
        for number in range(count):
            with agent_loop.rollout_trace_attr(step=1, sample_index=number, rollout_n=0):
                self.made += 1
        return self.made
