"""One prompt and its rollouts side by side, turn by turn, from the best reward to the worst."""

from __future__ import annotations

from math import isfinite
from typing import Any

from localtrace.errors import NotFound
from localtrace.read.excerpts import reference_of
from localtrace.viewer.addresses import group_url, prompt_url, step_filters, url, with_terms
from localtrace.viewer.excerpts import cut
from localtrace.viewer.numbers import mean
from localtrace.viewer.page import Facts, Page, copies, neighbours
from localtrace.viewer.page_request import PageRequest
from localtrace.viewer.pages.groups import groups_of
from localtrace.viewer.side_by_side import COLUMNS, side_by_side

_COLUMNS_MAX = 32
_IDS_SQL = f"""
select {COLUMNS}
from trajectories
where run_id = $run and step is not distinct from $step and validate = $validate
    and group_key = $key
order by finite(reward) desc nulls last, rollout_n, trace_id
"""


def read(request: PageRequest) -> Facts:
    """Return a group: its prompt, a column for each rollout, and their turns in rows."""
    params = _place(request)
    rows = request.rows(_IDS_SQL, params)
    if not rows:
        raise NotFound("no rollout is in this group: it may belong to another store or run")
    aligned = side_by_side(request, rows[:_COLUMNS_MAX])
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    first = rows[0]
    filters = _filters(params, first)
    return {
        "title": f"Sample {first['sample_index']}" if first["sample_index"] else "Group",
        "place": params,
        "sample_index": first["sample_index"],
        "group_id": first["group_id"],
        **aligned,
        "reference": cut(_reference(aligned["attributes"]), 2_000),
        "rollouts": len(rows),
        "left_out": max(0, len(rows) - _COLUMNS_MAX),
        "rewards": _summary(rewards, len(rows)),
        "step_url": url(
            "/groups", q=step_filters(params["run"], params["step"], params["validate"])
        ),
        "rollouts_url": url("/trajectories", q=filters, sort="reward"),
        "prompt_url": prompt_url(first),
        **_neighbours(request, params),
        "copies": copies(
            request,
            "select * from trajectories where run_id = $run and step is not distinct from $step "
            "and validate = $validate and group_key = $key order by finite(reward) desc nulls last",
            params,
            command=f"group {filters}",
            python=f"list(store.read({[row['trace_id'] for row in rows]!r}))",
        ),
    }


def _place(request: PageRequest) -> dict[str, Any]:
    step = request.values.get("step", "None")
    return {
        "run": request.required("run"),
        "key": request.required("key"),
        "step": int(step) if step.lstrip("-").isdigit() else None,
        "validate": request.values.get("validate") == "true",
    }


def _filters(params: dict[str, Any], row: dict[str, Any]) -> str:
    """Return filters that only the rollouts of the group meet."""
    named = {"group": row["group_id"], "sample_index": row["sample_index"],
             "prompt_hash": row["prompt_hash"]}  # fmt: skip
    name = next(name for name, value in named.items() if value is not None)
    q = step_filters(params["run"], params["step"], params["validate"])
    return with_terms(q, **{name: named[name]})


def _reference(attributes: list[dict[str, Any]]) -> str | None:
    found = map(reference_of, attributes)
    return next((one for one in found if one is not None), None)


def _summary(given: list[float], rollouts: int) -> dict[str, Any]:
    rewards = [reward for reward in given if isfinite(reward)]
    return {
        "known": len(rewards),
        "not_finite": len(given) - len(rewards),
        "mean": mean(rewards),
        "low": min(rewards, default=None),
        "high": max(rewards, default=None),
        "zero_variance": len(rewards) > 1 and min(rewards) == max(rewards),
        "lacking": rollouts - len(given),
    }


def _neighbours(request: PageRequest, params: dict[str, Any]) -> Facts:
    """Return the groups before and after in the list that the address names."""
    groups = groups_of(request) if request.q else []
    here = (params["run"], params["step"], params["validate"], params["key"])
    keys = [(one["run_id"], one["step"], one["validate"], one["group_key"]) for one in groups]
    sort = request.values.get("sort")
    return neighbours(
        keys.index(here) if here in keys else None,
        len(keys),
        lambda at: group_url(groups[at], request.q, sort),
    )


PAGE = Page("/group", "group.html", read)
