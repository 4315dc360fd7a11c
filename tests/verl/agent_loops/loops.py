"""verl's agent loops, their rollouts told apart: requests of one group would else be equal.

verl registers them through `agent_loop_config_path`, some in place of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.utils.rollout_trace import rollout_trace_op


def _seeded(sampling_params: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    # V0 tells rollouts of a group apart by their priority, V1 by their session.
    seed = f"{fields['uid']}/{fields.get('session_id', int(fields.get('priority', 0)))}"
    return {**sampling_params, "seed": seed}


class Tools(ToolAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return await super().run(_seeded(sampling_params, kwargs), **kwargs)


class SingleTurn(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return await super().run(_seeded(sampling_params, kwargs), **kwargs)


class Several(SingleTurnAgentLoop):
    """Gives two outputs for one session, as an agent does whose context was compacted."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        run = super().run
        params = [{**_seeded(sampling_params, kwargs), "part": part} for part in range(2)]
        return [await run(one, **kwargs) for one in params]


class Failing(AgentLoopBase):
    """Fails after its first turn."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        await self._generate(_seeded(sampling_params, kwargs), list(kwargs["raw_prompt"]))
        raise RuntimeError("the sandbox is gone")

    async def _generate(self, sampling_params: dict[str, Any], messages: list[Any]) -> None:
        ids = await self.ct_build_initial_tokens(messages)
        await self.server_manager.generate("one", prompt_ids=ids, sampling_params=sampling_params)


class Breaking(Failing):
    """Fails in a method that verl's own tracing sees."""

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return await super().run(sampling_params, **kwargs)


class Cancelled(Failing):
    """Is cancelled after its first turn."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        await self._generate(_seeded(sampling_params, kwargs), list(kwargs["raw_prompt"]))
        raise asyncio.CancelledError
