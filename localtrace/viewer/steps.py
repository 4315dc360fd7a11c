"""Steps of a run: rollouts, rewards, fates, and how complete the record of each is."""

from __future__ import annotations

from typing import Any

from localtrace.viewer.page_request import PageRequest

_SQL = """
select
    step,
    count(*) filter (not validate) as rollouts,
    count(*) filter (validate) as validation_rollouts,
    finite(avg(finite(reward)) filter (not validate)) as mean_reward,
    count(*) filter (status = 'dropped') as dropped,
    count(*) filter (status = 'interrupted') as interrupted,
    count(*) filter (status = 'running') as running,
    count(reward) filter (not validate) as rewarded,
    count(*) filter (not validate and not isfinite(reward)) as not_finite,
    count(fate) filter (not validate) as fated
from trajectories
where run_id = $run
group by step
order by step
"""


def steps_of(request: PageRequest, run_id: str) -> list[dict[str, Any]]:
    """Return a row for each step of a run, with a badge that says how complete it is."""
    rows: list[dict[str, Any]] = request.kept(
        ("steps", run_id), lambda: request.rows(_SQL, {"run": run_id})
    )
    return [row | {"badge": badge(row)} for row in rows]


def badge(row: dict[str, Any]) -> dict[str, str]:
    """Return how complete a step's record is: a word, and what is missing."""
    lost = [f"{row[name]} {name}" for name in ("dropped", "interrupted") if row[name]]
    open_ = [f"{row['running']} running"] if row["running"] else []
    without_reward = row["rollouts"] - row["rewarded"]
    open_ += [f"{without_reward} without a reward"] if without_reward else []
    without_fate = row["rollouts"] - row["fated"]
    unknown = [f"{without_fate} without a known fate"] if without_fate else []
    word = "gaps" if lost else "open" if open_ else "complete"
    odd = [f"{row['not_finite']} rewards not finite"] if row["not_finite"] else []
    why = ", ".join(lost + open_ + unknown + odd) or "every rollout is recorded"
    return {"word": word, "why": why}
