"""One call as Weave takes it."""

from __future__ import annotations

from typing import Any

import msgspec


class Call(msgspec.Struct, omit_defaults=True):
    """One call, as the route `calls/complete` takes it."""

    id: str
    project_id: str
    trace_id: str
    parent_id: str | None
    op_name: str
    started_at: str
    ended_at: str
    attributes: dict[str, Any]
    inputs: dict[str, Any]
    output: Any
    summary: dict[str, Any]
    exception: str | None
    wb_run_id: str | None
    wb_run_step: int | None
    display_name: str | None = None
