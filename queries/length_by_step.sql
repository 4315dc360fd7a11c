-- Tokens and turns of finished rollouts per step.
-- params:
-- plot: x=step y=mean_tokens by=run_id
select
    experiment,
    run_id,
    step,
    count(*) as trajectories,
    avg(output_tokens) as mean_tokens,
    quantile_cont(output_tokens, 0.95) as p95_tokens,
    max(output_tokens) as max_tokens,
    avg(turn_count) as mean_turns,
    max(turn_count) as max_turns
from trajectories
where status in ('ok', 'error')
group by experiment, run_id, step
order by experiment, run_id, step
