"""The prompts of a run, by how much their reward changed from a step on: the worst first."""

from __future__ import annotations

from localtrace.read.filters import Filters
from localtrace.viewer.addresses import url
from localtrace.viewer.excerpts import with_texts
from localtrace.viewer.numbers import scale
from localtrace.viewer.page import Facts, Page, copies
from localtrace.viewer.page_request import PageRequest

_SHOWN = 40
_SQL = """
select
    coalesce(prompt_hash, sample_index) as prompt_key, validate,
    any_value(sample_index) as sample_index, any_value(data_source) as data_source,
    finite(avg(finite(reward)) filter (step < $at)) as before,
    finite(avg(finite(reward)) filter (step >= $at)) as after,
    after - before as change,
    count(finite(reward)) filter (step < $at) as rollouts_before,
    count(finite(reward)) filter (step >= $at) as rollouts_after,
    count(*) filter (not isfinite(reward)) as not_finite,
    arg_max(trace_id, row(step, trace_id)) as trace_id, max(step) as step
from trajectories
where run_id = $run and reward is not null and step is not null
    and coalesce(prompt_hash, sample_index) is not null
group by 1, 2
"""
SORTS = {
    "change": "change asc nulls last",
    "-change": "change desc nulls last",
    "after": "after asc nulls last",
    "before": "before asc nulls last",
}


def read(request: PageRequest) -> Facts:
    """Return the prompts that have rewards before a step and from it on; the rest as a count."""
    run = request.required("run")
    every = Filters().relation(with_superseded=True)
    steps = request.rows(
        f"select min(step) as low, max(step) as high from {every} where run_id = $run",
        {"run": run},
    )[0]
    middle = ((steps["low"] or 0) + (steps["high"] or 0) + 1) // 2
    at = request.number("at", middle)
    sort = request.one_of("sort", SORTS, "change")
    params = {"run": run, "at": at}
    (counts,) = request.rows(
        f"select count(*) as prompts, count(change) as compared from ({_SQL})", params
    )
    order = f"{SORTS[sort]}, prompt_key"
    sql = f"{_SQL}\nhaving after is not null and before is not null\norder by {order}"
    shown = request.number("shown", _SHOWN, 1_000)
    rows = with_texts(request, request.rows(f"{sql} limit {shown}", params))
    return {
        "title": f"Prompts before step {at} and from it on",
        "run_id": run,
        "at": at,
        "steps": steps,
        "prompts": [
            row | {"url": url("/prompt", run=run, key=row["prompt_key"], at=at)} for row in rows
        ],
        **scale(one for row in rows for one in (row["before"], row["after"])),
        "sort": sort,
        "prompts_total": counts["prompts"],
        "compared": counts["compared"],
        "more": url("/prompts", run=run, at=at, sort=sort, shown=10 * shown)
        if counts["compared"] > shown
        else None,
        "copies": copies(
            request,
            sql,
            params,
        ),
    }


PAGE = Page("/prompts", "prompts.html", read)
