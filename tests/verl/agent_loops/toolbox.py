"""A tool of the older kind: a class that overrides `execute`, without verl's decorator."""

from __future__ import annotations

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Add(BaseTool):
    """Adds two numbers, and is rewarded for small ones."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        total = parameters["a"] + parameters["b"]
        return ToolResponse(text=str(total)), 1 / (1 + total), {"total": total}
