"""Agent loop managers that a job may name: one of verl's kind, and one that knows only clients."""

from __future__ import annotations

from verl.experimental.agent_loop.agent_loop import AgentLoopManager


class Own(AgentLoopManager):
    """Runs rollouts in verl's workers."""


class Gateway:
    """Runs rollouts by itself."""
