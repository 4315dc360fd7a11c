-- Calls that failed, by op and kind of error.
-- params: run (optional), experiment (optional), step (range, optional)
-- needs: calls, of functions under @localtrace.op <- from spans
-- Superseded attempts are left out; validation counts.
select
    op,
    status,
    split_part(error, ':', 1) as error_type,
    count(*) as calls,
    count(distinct trace_id) as trajectories,
    min(step) as first_step,
    max(step) as last_step,
    arg_max(error, start_ns) as newest_error,
    arg_max(trace_id, start_ns) as newest_trace_id
from spans
where status <> 'ok'
    and ($run is null or run_id = $run) and ($experiment is null or experiment = $experiment)
    and ($step_from is null or step >= $step_from) and ($step_to is null or step <= $step_to)
    and trace_id not in (select trace_id from superseded)
group by op, status, error_type
order by calls desc, op, error_type
