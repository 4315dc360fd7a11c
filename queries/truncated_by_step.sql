-- Rollouts that a length limit cut off, per step, and what they earned.
-- params: run (optional), experiment (optional)
-- plot: x=step y=truncated_share by=run_id
-- needs: turns, calls with prompt_ids, messages or a prompt whose result says what was generated <- from turns
-- Validation and superseded attempts are left out.
select
    t.experiment,
    t.run_id,
    t.step,
    count(*) as trajectories,
    count(*) filter (d.truncated) as truncated,
    avg(d.truncated::int) as truncated_share,
    avg(t.reward) filter (d.truncated) as mean_reward_truncated,
    avg(t.reward) filter (not d.truncated) as mean_reward_others
from trajectories as t
join detectors as d on d.trace_id = t.trace_id and d.step is not distinct from t.step
where ($run is null or t.run_id = $run) and ($experiment is null or t.experiment = $experiment)
    and not t.validate
group by t.experiment, t.run_id, t.step
order by t.experiment, t.run_id, t.step
