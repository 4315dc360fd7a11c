-- pass@k and best-of-k of every prompt of a step, hardest first.
-- params: k, step (optional), threshold (optional), run (optional), experiment (optional)
-- A rollout passes with a reward of at least the threshold, 1 when not given; see pass_at_k for the
-- estimates. Groups of fewer than k rollouts with a reward (nan is none) are left out, as are
-- validation and superseded attempts.
select
    experiment,
    run_id,
    step,
    group_id,
    sample_index,
    n,
    c as passed,
    if(n - c < k, 1.0, 1 - exp(
        lgamma(n - c + 1) - lgamma(n - c - k + 1) - lgamma(n + 1) + lgamma(n - k + 1)
    )) as pass_at_k,
    list_sum(list_transform(range(k, n + 1), lambda i: rewards[i] * k / i * exp(
        lgamma(i + 1) - lgamma(i - k + 1) - lgamma(n + 1) + lgamma(n - k + 1)
    ))) as best_of_k
from (
    select
        experiment, run_id, step, group_id, any_value(sample_index) as sample_index,
        $k::bigint as k,
        count(*) as n,
        count(*) filter (reward >= coalesce($threshold::double, 1.0)) as c,
        list(reward order by reward) as rewards
    from trajectories
    where not isnan(reward) and (group_id is not null or sample_index is not null)
        and not validate
        and ($run is null or run_id = $run) and ($experiment is null or experiment = $experiment)
        and ($step is null or step = $step::bigint)
    group by experiment, run_id, step, group_id, if(group_id is null, sample_index, null)
)
where n >= k and k >= 1
order by pass_at_k, best_of_k, experiment, run_id, step, sample_index, group_id
