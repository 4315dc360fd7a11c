"""A tool whose `execute` verl's own tracing sees, in place of the one that it does not."""

from __future__ import annotations

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class Add(BaseTool):
    """Adds two numbers; fails where one is missing."""

    @rollout_trace_op
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        total = parameters["a"] + parameters["b"]
        return ToolResponse(text=str(total)), 1 / (1 + total), {"total": total}
