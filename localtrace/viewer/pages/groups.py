"""The groups of a step, or of any filters: the worst first."""

from __future__ import annotations

from typing import Any

from localtrace.read.filters import Filters
from localtrace.viewer.addresses import group_url, url, with_terms
from localtrace.viewer.excerpts import with_texts
from localtrace.viewer.numbers import scale
from localtrace.viewer.page import Facts, Page, copies
from localtrace.viewer.page_request import PageRequest

SORTS = {
    "reward": "mean_reward asc nulls last",
    "-reward": "mean_reward desc nulls last",
    "spread": "std_reward desc nulls last",
    "flat": "zero_variance desc nulls last, mean_reward asc nulls last",
    "step": "step asc nulls last",
    "-step": "step desc nulls last",
    "length": "mean_tokens desc nulls last",
}
"""The orders of groups, by the name in the address."""
_SHOWN = 60
_SQL = """
with hits as (
    select distinct run_id, step, validate, group_key
    from {relation} where group_key is not null and {condition}
)
select
    t.run_id, t.step, t.validate, t.group_key, any_value(t.group_id) as group_id,
    any_value(t.sample_index) as sample_index, any_value(t.prompt_hash) as prompt_hash,
    count(*) as rollouts, count(finite(t.reward)) as rewards,
    count(*) filter (not isfinite(t.reward)) as not_finite,
    finite(avg(finite(t.reward))) as mean_reward,
    min(finite(t.reward)) as min_reward, max(finite(t.reward)) as max_reward,
    finite(stddev_samp(finite(t.reward))) as std_reward,
    if(count(finite(t.reward)) > 1, min(finite(t.reward)) = max(finite(t.reward)), null)
        as zero_variance,
    avg(t.output_tokens) as mean_tokens, list_sort(list(distinct t.fate)) as fates,
    count(*) filter (t.status <> 'ok') as not_ok, min(t.trace_id) as trace_id
from trajectories as t
semi join hits as h on h.run_id = t.run_id and h.step is not distinct from t.step
    and h.validate = t.validate and h.group_key = t.group_key
where {pruning}
group by t.run_id, t.step, t.validate, t.group_key
order by {order}, t.run_id, t.step nulls last, sample_index, t.group_key
"""
_PRUNING = ("run", "step", "validate", "project", "experiment")
"""Filters that all rollouts of a group meet alike."""


def groups_of(request: PageRequest) -> list[dict[str, Any]]:
    """Return every group with a rollout that matches the filters, in the requested order."""
    # The order of another page's list, such as that of trajectories, is none of groups.
    sort = request.values.get("sort", "")
    sort = sort if sort in SORTS else "reward"
    sql = _SQL.format(
        relation=request.filters.relation(), condition=request.condition, order=SORTS[sort],
        pruning=_pruning(request),
    )  # fmt: skip
    found: list[dict[str, Any]] = request.kept(
        ("groups", request.q, sort), lambda: request.rows(sql, request.params)
    )
    return found


def read(request: PageRequest) -> Facts:
    """Return the groups that are shown, and what leads on from them."""
    groups = groups_of(request)
    shown, sort = request.number("shown", _SHOWN, 2_000), request.values.get("sort")
    rows = [row | {"url": group_url(row, request.q, sort)}
            for row in with_texts(request, groups[:shown])]  # fmt: skip
    run, step = _single(groups, "run_id"), _single(groups, "step")
    rewarded = [row for row in groups if row["mean_reward"] is not None]
    known = sum(row["rewards"] for row in rewarded)
    return {
        "title": f"Step {step}" if step is not None else "Groups",
        "groups": rows,
        "total": len(groups),
        "zero_variance": sum(bool(row["zero_variance"]) for row in groups),
        "rollouts": sum(row["rollouts"] for row in groups),
        "not_finite": sum(row["not_finite"] for row in groups),
        "is_of_matches": any(term.key not in _PRUNING for term in request.filters.terms),
        "mean_reward": sum(row["mean_reward"] * row["rewards"] for row in rewarded) / known
        if known else None,
        **scale(row["mean_reward"] for row in groups),
        "flat_url": url("/groups", q=request.q, sort="flat"),
        "sort": sort or "reward",
        "run_id": run,
        "run_names": request.several_runs,
        "step": step,
        "steps": _neighbours(request, run, step),
        "more": url("/groups", q=request.q, sort=sort, shown=10 * shown)
        if len(groups) > shown
        else None,
        "prompts_url": url("/prompts", run=run, at=step) if run and step is not None else None,
        "copies": copies(
            request,
            "select g.* from groups as g semi join "
            f"(select * from trajectories where {request.condition}) as t on t.run_id = g.run_id "
            "and t.step is not distinct from g.step and t.validate = g.validate "
            "and t.group_key = g.group_key",
            request.params,
        ),
    }  # fmt: skip


def _pruning(request: PageRequest) -> str:
    """Return a condition in which only values of groups stand, so that files are skipped."""
    terms = [term for term in request.filters.terms if term.key in _PRUNING]
    names = [f"filter_{at}_0" for at, term in enumerate(request.filters.terms) if term in terms]
    parts = [
        f"t.step {term.operator} ${name}"
        for term, name in zip(terms, names, strict=True)
        if term.key == "step" and len(term.values) == 1
    ]
    return " and ".join(parts) or "true"


def _single(groups: list[dict[str, Any]], column: str) -> Any:
    values = {row[column] for row in groups}
    return values.pop() if len(values) == 1 else None


def _neighbours(request: PageRequest, run: str | None, step: int | None) -> dict[str, str | None]:
    """Return the addresses of the steps before and after, with the other filters kept."""
    if run is None or step is None:
        return {"before": None, "after": None}
    every = Filters().relation(with_superseded=True)
    (row,) = request.rows(
        "select max(step) filter (step < $step) as before, "
        f"min(step) filter (step > $step) as after from {every} where run_id = $run",
        {"run": run, "step": step},
    )
    return {
        name: None
        if at is None
        else url("/groups", q=with_terms(request.q, step=at), sort=request.values.get("sort"))
        for name, at in row.items()
    }


PAGE = Page("/groups", "groups.html", read)
