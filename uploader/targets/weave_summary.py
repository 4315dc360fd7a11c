"""Summaries of calls at Weave: statuses and tokens of a call and of all calls below it.

The sums equal those of Weave's own client. Only the tokens of turns, which it does not know, are
added.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from localtrace.types import FAILED_STATUSES, Span, Trajectory
from localtrace.uploader.targets.weave_values import text
from localtrace.uploader.transcripts import Chat

_Sums: TypeAlias = Counter[tuple[str, ...]]
"""Counts by path in the summary."""
_MODEL_MAX_CHARS = 200


def summaries(
    trajectory: Trajectory, chats: Mapping[str, Chat]
) -> dict[str | None, dict[str, Any]]:
    """Return the summary of each call by span id; the key None is the trajectory itself.

    Args:
        chats: turns in a form to read, which also know models that no call names, and usage.
    """
    spans = {span.span_id: span for span in trajectory.spans}
    sums: defaultdict[str | None, _Sums] = defaultdict(Counter)
    for span in reversed(trajectory.spans):  # calls before their callers, which began earlier
        sums[span.span_id].update(_own(span, chats.get(span.span_id)))
        caller = span.parent_id if span.parent_id in spans else None
        sums[caller].update(sums[span.span_id])
    sums[None][_status(trajectory.status)] += 1
    return {span_id: _nested(counted.items()) for span_id, counted in sums.items()}


def _own(span: Span, chat: Chat | None) -> _Sums:
    counted: _Sums = Counter({_status(span.status): 1})
    used = None if chat is None else chat.usage
    if span.is_turn and span.prompt_ids is not None and span.generated_count is not None:
        used = used or (len(span.prompt_ids), span.generated_count)
    if used is not None:
        read, written = used
        model = chat.model if chat is not None else None
        usage = ("usage", _model(span) or text(model or "unknown")[:_MODEL_MAX_CHARS])
        counted[*usage, "prompt_tokens"] = read
        counted[*usage, "completion_tokens"] = written
        counted[*usage, "total_tokens"] = read + written
        counted[*usage, "requests"] = 1
    return counted


def _status(status: str) -> tuple[str, str]:
    return ("status_counts", "error" if status in FAILED_STATUSES else "success")


def _model(span: Span) -> str | None:
    for fields in (span.outputs, span.inputs):
        if isinstance(fields, dict) and isinstance(fields.get("model"), str):
            return text(fields["model"])[:_MODEL_MAX_CHARS]
    return None


def _nested(counted: Iterable[tuple[tuple[str, ...], int]]) -> dict[str, Any]:
    summary: dict[str, Any] = {"status_counts": {"success": 0, "error": 0}}
    for (*path, last), count in counted:
        inner = summary
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = count
    return summary
