"""The first page: the runs of the store; a single run's page where there is only one."""

from __future__ import annotations

from typing import Any

from localtrace.viewer.addresses import part
from localtrace.viewer.charts import chart_of, line
from localtrace.viewer.page import Facts, Page, copies
from localtrace.viewer.page_request import PageRequest

_SQL = """
select
    r.run_id, max_by(r.project, r.attempt) as project,
    max_by(r.experiment, r.attempt) as experiment,
    max(r.attempt) + 1 as attempts, min(r.start_ns) as start_ns, max(t.last_ns) as last_ns,
    max_by(r.end_ns, r.attempt) as end_ns, any_value(t.trajectories) as trajectories,
    any_value(t.first_step) as first_step, any_value(t.last_step) as last_step,
    any_value(t.curve) as curve, any_value(t.not_finite) as not_finite
from runs as r
left join (
    select
        run_id, sum(n)::bigint as trajectories, min(step) as first_step, max(step) as last_step,
        max(last_ns) as last_ns, sum(not_finite)::bigint as not_finite,
        list([step, mean_reward] order by step) filter (mean_reward is not null) as curve
    from (
        select run_id, step, count(*) as n, count(*) filter (not isfinite(reward)) as not_finite,
            finite(avg(finite(reward)) filter (not validate)) as mean_reward,
            max(coalesce(end_ns, start_ns)) as last_ns
        from trajectories group by run_id, step
    ) group by run_id
) as t on t.run_id = r.run_id
group by r.run_id
order by start_ns desc
"""


def read(request: PageRequest) -> Facts:
    """Return the runs, the newest first."""
    runs = request.kept("runs", lambda: request.rows(_SQL))
    return {
        "title": "Runs",
        "runs": [
            run | {"run_name": request.run_names.get(run["run_id"]), "chart": _chart(run)}
            for run in runs
        ],
        "copies": copies(request, "select * from runs", {}, "runs", "store.runs().to_pandas()"),
    }


def _chart(run: dict[str, Any]) -> dict[str, Any]:
    why = "no reward yet"
    return chart_of(f"Reward of {run['run_id']}", [line("reward", run["curve"] or ())], why=why)


def read_first(request: PageRequest) -> Facts:
    """Return the runs, or where the only one is shown."""
    facts = read(request)
    if len(facts["runs"]) == 1:
        return {"go": f"/run/{part(facts['runs'][0]['run_id'])}"}
    return facts


PAGE = Page("/", "runs.html", read_first)
RUNS = Page("/runs", "runs.html", read)
