"""Addresses of steps, groups and prompts, to which several pages lead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localtrace.viewer.asked import url, with_terms


def step_filters(run_id: str, step: int | None, validate: bool | None = None) -> str:
    """Return the filters of a run's rollouts at a step; None: of those without a step."""
    if step is None:
        return with_terms("", run=run_id, validate=validate, where="step is null")
    return with_terms("", run=run_id, step=step, validate=validate)


def group_url(row: Mapping[str, Any], q: str | None = None, sort: str | None = None) -> str | None:
    """Return the address of a rollout's group; None: it is in none.

    Args:
        row: run_id, step, validate and group_key of a rollout or of a group.
        q: the filters of the list that it stands in; None: those of its step.
        sort: the order of that list.
    """
    if row["group_key"] is None:
        return None
    place = {"run": row["run_id"], "step": row["step"], "key": row["group_key"]}
    if q is None:
        q = step_filters(row["run_id"], row["step"], row["validate"])
    return url("/group", **place, validate=row["validate"] or None, q=q, sort=sort)


def prompt_url(row: Mapping[str, Any]) -> str | None:
    """Return the address of a rollout's prompt over all steps; None: it cannot be known again.

    Args:
        row: run_id, prompt_hash and sample_index.
    """
    key = row["prompt_hash"] or row["sample_index"]
    return None if key is None else url("/prompt", run=row["run_id"], key=key)
