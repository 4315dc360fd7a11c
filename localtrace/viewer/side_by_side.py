"""Rollouts side by side: a column for each, their turns in rows, and where they diverge."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from localtrace.read.diff import Difference, Part, Turn, first_difference, pairs, turn_parts, words
from localtrace.read.unseen import why_no_calls
from localtrace.store.whole_prompts import shared_prefix
from localtrace.types import Trajectory
from localtrace.viewer.addresses import part, url
from localtrace.viewer.excerpts import cut
from localtrace.viewer.numbers import is_finite, scale
from localtrace.viewer.page import Facts
from localtrace.viewer.page_request import PageRequest

_CELL_MAX = 1_200
_BEFORE_MAX = 240
"""The characters of a cell that are shown before the first difference."""
_PREFIX = "prompt: "
"""The words before a prompt that is no list of messages."""
_KNOWN = frozenset({"reward", "advantage", "fate", "fate_reason", "trained_step"})
COLUMNS = (
    "trace_id, run_id, step, reward, advantage, fate, fate_reason, turn_count, "
    "output_tokens, rollout_n, group_id, sample_index, prompt_hash"
)
"""Columns of trajectories that `side_by_side` reads."""


def side_by_side(request: PageRequest, rows: list[dict[str, Any]]) -> Facts:
    """Return trajectories as columns; each is compared with the first.

    Args:
        request: the request.
        rows: their rows with `COLUMNS`, the one that others are compared with first.
    """

    def links(row: dict[str, Any]) -> dict[str, str | None]:
        path = f"/trajectory/{part(row['trace_id'])}"
        return {"url": url(path, q=request.q or None, sort=request.values.get("sort")),
                "tokens_url": f"{path}/tokens"}  # fmt: skip

    shown = list(request.store.read([row["trace_id"] for row in rows]))
    return aligned(rows, shown, links)


def aligned(
    rows: list[dict[str, Any]],
    shown: list[Trajectory],
    links: Callable[[dict[str, Any]], dict[str, str | None]],
) -> Facts:
    """Return trajectories as columns; each is compared with the first.

    Args:
        rows: a row with `COLUMNS` for each.
        shown: the trajectories.
        links: gives `url` and `tokens_url` of a row; null: no link.
    """
    sides = [turn_parts(trajectory) for trajectory in shown]
    rewards = [row["reward"] for row in rows if is_finite(row["reward"])]
    columns = [
        _column(row, one, None if at == 0 else _difference(shown, sides, at), rewards) | links(row)
        for at, (row, one) in enumerate(zip(rows, shown, strict=True))
    ]
    table, prompt = _table(sides, {column["parts_at"] for column in columns})
    return {
        "columns": columns,
        **scale(rewards),
        "advantage": max(
            (abs(row["advantage"]) for row in rows if is_finite(row["advantage"])), default=0
        ),
        "facts": _facts(columns),
        "turns": table,
        "prompt": prompt,
        "attributes": [one.attributes for one in shown],
    }


def _difference(shown: list[Trajectory], sides: list[list[Turn]], at: int) -> Difference | None:
    """Return where a rollout parts from the first; None also where the calls of one are gone."""
    if why_no_calls(shown[0]) or why_no_calls(shown[at]):
        return None
    return first_difference(sides[0], sides[at])


def _column(
    row: dict[str, Any],
    trajectory: Trajectory,
    difference: Difference | None,
    rewards: list[float],
) -> dict[str, Any]:
    turns = trajectory.turns
    numbers = {
        one.name: one.number
        for one in trajectory.outcomes
        if one.number is not None and one.name not in _KNOWN
    }
    scalars = {
        name: value
        for name, value in trajectory.attributes.items()
        if isinstance(value, bool | int | float)
    }
    spread = len(set(rewards)) > 1
    return {
        "trace_id": trajectory.trace_id,
        "rollout_n": trajectory.rollout_n,
        "run_id": trajectory.run_id,
        "step": trajectory.step,
        "sample_index": trajectory.sample_index,
        "mark": None
        if not spread or row["reward"] not in (max(rewards), min(rewards))
        else "best" if row["reward"] == max(rewards) else "worst",
        "reward": row["reward"],
        "advantage": row["advantage"],
        "fate": row["fate"],
        "fate_reason": row["fate_reason"],
        "why_no_calls": why_no_calls(trajectory),
        "status": trajectory.status,
        "error": trajectory.error,
        "turn_count": row["turn_count"],
        "output_tokens": row["output_tokens"],
        "finish_reason": turns[-1].finish_reason if turns else None,
        "duration_ns": None if trajectory.end_ns is None
        else trajectory.end_ns - trajectory.start_ns,
        "numbers": scalars | numbers,
        "parts_at": None if difference is None else difference.turn,
        "parts_in": None if difference is None else difference.part,
    }  # fmt: skip


def _facts(columns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the further numbers: those that differ in rows, and those that are all the same."""
    names = dict.fromkeys(name for column in columns for name in column["numbers"])
    rows, alike = [], {}
    for name in names:
        values = [column["numbers"].get(name) for column in columns]
        if len(set(values)) == 1 and len(values) > 1:
            alike[name] = values[0]
        else:
            rows.append({"name": name, "values": values})
    return {"rows": rows, "alike": alike}


def _table(
    sides: list[list[Turn]], parts_at: set[str | None]
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the turns in rows, and the first prompt where all rollouts share it.

    Args:
        sides: the turns of each rollout, the best one's first.
        parts_at: the names of the turns where a rollout parts from the best one.
    """
    given = {_given(side) for side in sides if side}  # those without calls tell no prompt
    prompt = given.pop() if len(given) == 1 else None
    ends = [next((turn for turn in side if turn.is_end), None) for side in sides]
    turns = [[turn for turn in side if not turn.is_end] for side in sides]
    by_row = [(f"turn {at}", row) for at, row in enumerate(zip_longest(*turns))]
    by_row += [("after the last turn", tuple(ends))] if any(ends) else []
    rows: list[dict[str, Any]] = []
    for name, row in by_row:
        shared = prompt if name == "turn 0" else None
        cells = [None if turn is None else _cell(turn, row[0], shared) for turn in row]
        is_first = name in parts_at and not any(one["first"] for one in rows)
        rows.append({"name": name, "cells": cells, "first": is_first})
    return rows, cut(None if prompt is None else prompt.removeprefix(_PREFIX), 4_000)


def _given(side: list[Turn]) -> str | None:
    parts = side[0].parts if side else []
    return next((one.text for one in parts if one.name == "given"), None)


def _cell(turn: Turn, best: Turn | None, prompt: str | None) -> list[dict[str, Any]]:
    """Return the parts of a turn, each with the part that it shares with the best rollout."""
    made = [
        _shown(one, other)
        for other, one in pairs(best or Turn([]), turn)
        if one is not None and one.text and not _is_known(one, other, prompt)
    ]
    # What a tool answered is given to the model afterwards.
    return sorted(made, key=lambda one: not one["name"].startswith("call "))


def _is_known(one: Part, other: Part | None, prompt: str | None) -> bool:
    """Return whether the page shows a part elsewhere: the shared prompt, a usual finish reason."""
    if one.name == "given":
        return prompt is not None
    return one.name == "finish reason" and other is not None and other.text == one.text


def _shown(one: Part, other: Part | None) -> dict[str, Any]:
    is_same = other is not None and other.text == one.text
    same = len(one.text) if is_same else 0
    if other is not None and not is_same:
        ours = words(one.text)
        same = sum(map(len, ours[: shared_prefix(ours, words(other.text))]))
    start = 0 if is_same or same <= _BEFORE_MAX else same - _BEFORE_MAX // 2
    end = start + _CELL_MAX
    return {
        "name": one.name,
        "before": start,
        "same": one.text[start : min(same, end)].removeprefix("" if start else _PREFIX),
        "differs": one.text[same:end] if not is_same else "",
        "left_out": max(0, len(one.text) - end),
        "is_same": is_same,
    }
