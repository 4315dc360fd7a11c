-- Failed calls of each tool per step.
-- params:
-- plot: x=step y=failed_share by=run_id,op
-- needs: calls of tools, such as functions under @localtrace.op(kind="tool") <- from spans where kind = 'tool'
-- trajectories counts the rollouts with a failed call of the tool. Calls that were cancelled did not
-- fail. tool_errors says with which messages calls failed.
select
    experiment,
    run_id,
    step,
    op,
    count(*) as calls,
    count(*) filter (status = 'error') as failed,
    avg((status = 'error')::int) as failed_share,
    count(distinct trace_id) filter (status = 'error') as trajectories
from spans
where kind = 'tool'
group by experiment, run_id, step, op
order by experiment, run_id, step, op
