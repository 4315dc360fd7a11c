"""The page of a run: its curves, what became of its rollouts, and how complete its record is."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from localtrace.errors import NotFound
from localtrace.read.losses import add_up
from localtrace.schema import TABLES
from localtrace.viewer.addresses import part, step_filters, url, with_terms
from localtrace.viewer.page import Facts, Page, copies, literal
from localtrace.viewer.page_request import PageRequest
from localtrace.viewer.pages.chart import CHARTS
from localtrace.viewer.steps import steps_of

_RUN_SQL = """
select run_id, project, experiment, attempt, start_ns, end_ns, hosts, command, git_commit, versions,
    losses, processes, closed_processes
from runs where run_id = $run order by attempt desc
"""
_FATES_SQL = """
select fate, fate_reason, status, count(*) as rollouts,
    finite(avg(finite(reward))) as mean_reward,
    count(*) filter (not isfinite(reward)) as not_finite,
    min(step) as first_step, max(step) as last_step
from trajectories where run_id = $run and not validate
group by all order by rollouts desc, fate, status limit 20
"""
_OTHERS_SQL = """
select run_id, any_value(experiment) as experiment, min(start_ns) as start_ns
from runs where run_id <> $run group by run_id order by start_ns desc limit 40
"""
_METRICS_SQL = """
select name, count(*) as values from metrics where run_id = $run group by name order by name
"""
_NEWEST_SQL = """
select max(coalesce(end_ns, start_ns)) as newest_ns from stored.trajectories where run_id = $run
"""


def read(request: PageRequest) -> Facts:
    """Return the facts of a run."""
    run_id = request.run_id(request.path_values["run_id"])
    params = {"run": run_id}
    attempts = request.rows(_RUN_SQL, params)
    if not attempts:
        raise NotFound(f"no run is called {run_id}: the page Runs lists them")
    steps = steps_of(request, run_id)
    also = [one for one in request.values.get("also", "").split(",") if one]
    return {
        "title": attempts[0]["experiment"],
        "run": attempts[0] | {"run_name": request.run_names.get(run_id)},
        "attempts": len(attempts),
        "steps": [row | {"url": url("/groups", q=step_filters(run_id, row["step"]))}
                  for row in steps],
        "rewarded_steps": len(_rewarded(steps)),
        "fates": [_fate(run_id, row) for row in request.rows(_FATES_SQL, params)],
        "others": [one | {"run_name": request.run_names.get(one["run_id"])}
                   for one in request.rows(_OTHERS_SQL, params)],
        "also": also,
        "metrics": request.rows(_METRICS_SQL, params),
        "charts": [
            {"title": chart.title, "url": url("/chart", name=name, run=run_id, also=",".join(also))}
            for name, chart in CHARTS.items()
        ],
        "unsealed": request.store.unsealed_rows("trajectories"),
        "recording": _recording(request, attempts),
        "worst_steps": _worst(run_id, steps),
        "copies": copies(
            request,
            "select step, avg(finite(reward)) from trajectories where run_id = $run "
            "and not validate group by step order by step",
            params,
            f"query reward_by_step {shlex.quote(f'run={run_id}')} --plot",
            f'store.query("reward_by_step", run={run_id!r}).to_pandas()',
        ),
        "path": f"/run/{part(run_id)}",
    }  # fmt: skip


def _recording(request: PageRequest, attempts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how the recording does: what is newest, open, waiting, lost and unreadable."""
    (row,) = request.rows(_NEWEST_SQL, {"run": attempts[0]["run_id"]})
    damage: Counter[str] = Counter()
    for snapshot in request.store.snapshots:
        damage.update(asdict(snapshot.damage))
    return {
        "newest_ns": row["newest_ns"],
        "processes": sum(one["processes"] for one in attempts),
        "closed_processes": sum(one["closed_processes"] for one in attempts),
        "unsealed_rows": {name: count for name in TABLES
                          if (count := request.store.unsealed_rows(name))},
        "lost": add_up(text for one in attempts for text in one["losses"] or ()),
        "unreadable": {name.replace("_", " "): count for name, count in damage.items() if count},
    }  # fmt: skip


def _fate(run_id: str, row: dict[str, Any]) -> dict[str, Any]:
    where = None
    if row["fate"] is None:
        where = "fate is null"
    elif row["fate_reason"] is not None:
        where = f"fate_reason = {literal(row['fate_reason'])}"
    q = with_terms("", run=run_id, validate=False, status=row["status"], fate=row["fate"],
                   where=where)  # fmt: skip
    return row | {"url": url("/groups", q=q, sort="step")}


def _rewarded(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in steps if row["step"] is not None and row["mean_reward"] is not None]


def _worst(run_id: str, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps after which the mean reward fell most, the worst first."""
    falls = [
        {
            "step": after["step"],
            "change": after["mean_reward"] - before["mean_reward"],
            "url": url("/groups", q=step_filters(run_id, after["step"], validate=False)),
            "prompts_url": url("/prompts", run=run_id, at=after["step"]),
        }
        for before, after in pairwise(_rewarded(steps))
        if after["mean_reward"] < before["mean_reward"]
    ]
    return sorted(falls, key=lambda one: one["change"])[:5]


PAGE = Page("/run/{run_id}", "run.html", read)
