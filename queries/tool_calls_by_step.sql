-- Calls of tools per rollout and step, and how many failed.
-- params: run (optional), experiment (optional)
-- plot: x=step y=mean_tool_calls by=run_id
-- derived_share is the share of the calls that nobody said to be tools (kind_derived in spans): their
-- place among the turns tells. Validation and superseded attempts are left out.
select
    t.experiment,
    t.run_id,
    t.step,
    count(*) as trajectories,
    sum(coalesce(calls, 0))::bigint as tool_calls,
    avg(coalesce(calls, 0)) as mean_tool_calls,
    max(coalesce(calls, 0)) as max_tool_calls,
    sum(failures) / nullif(sum(calls), 0) as failed_share,
    sum(derived) / nullif(sum(calls), 0) as derived_share
from trajectories as t
left join (
    select
        trace_id, step, count(*) as calls, count(*) filter (status = 'error') as failures,
        count(*) filter (kind_derived) as derived
    from spans
    where kind = 'tool'
    group by trace_id, step
) as tools on tools.trace_id = t.trace_id and tools.step is not distinct from t.step
where ($run is null or t.run_id = $run) and ($experiment is null or t.experiment = $experiment)
    and not t.validate
group by t.experiment, t.run_id, t.step
order by t.experiment, t.run_id, t.step
