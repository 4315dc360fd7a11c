-- How surprised the policy is by its own tokens per step: the mean of -logprob, a proxy of entropy.
-- params: run (optional), experiment (optional)
-- Log-probabilities are the engine's, in nats; at a temperature other than 1 they are not the
-- policy's entropy. Validation and superseded attempts are left out.
select
    t.experiment,
    t.run_id,
    t.step,
    count(*) as turns,
    sum(list_count(output_logprobs))::bigint as tokens,
    -sum(list_sum(output_logprobs)) / nullif(sum(list_count(output_logprobs)), 0) as mean_surprise,
    min(-list_avg(output_logprobs)) as lowest_turn,
    max(-list_avg(output_logprobs)) as highest_turn
from turns as u
join trajectories as t on t.trace_id = u.trace_id and t.step is not distinct from u.step
where ($run is null or t.run_id = $run) and ($experiment is null or t.experiment = $experiment)
    and not t.validate and len(output_logprobs) > 0
group by t.experiment, t.run_id, t.step
order by t.experiment, t.run_id, t.step
