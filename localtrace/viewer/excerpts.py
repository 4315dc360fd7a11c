"""Prompts and answers of trajectories for lists, read together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localtrace.read.excerpts import Excerpt, read_excerpts
from localtrace.viewer.page_request import PageRequest

PROMPT_MAX, ANSWER_MAX = 4_000, 2_000
"""The characters of a prompt and of an answer that lists hold."""


def excerpts_of(request: PageRequest, steps: Mapping[str, int | None]) -> dict[str, Excerpt]:
    """Return the prompt and the last answer of each trajectory, by trace id.

    Args:
        request: the request.
        steps: the step of each trajectory, by trace id.
    """
    found = read_excerpts(request.table, request.store.decode, steps)
    return {trace_id: found.get(trace_id, Excerpt(None, None)) for trace_id in steps}


def with_texts(request: PageRequest, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with the columns `prompt` and `answer`, by their `trace_id` and `step`."""
    found = excerpts_of(request, {row["trace_id"]: row["step"] for row in rows})
    return [
        row
        | {
            "prompt": cut(found[row["trace_id"]].prompt, PROMPT_MAX),
            "answer": cut(found[row["trace_id"]].answer, ANSWER_MAX),
        }
        for row in rows
    ]


def cut(text: str | None, most: int) -> str | None:
    """Return a text's beginning and end, where it is long."""
    if text is None or len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} …({len(text) - 2 * half:,} characters)… {text[-half:]}"
