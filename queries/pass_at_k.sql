-- pass@k and best-of-k per step, for every k up to the size of the groups.
-- params: threshold (optional), validate (optional), run (optional), experiment (optional)
-- A rollout passes with a reward of at least the threshold, 1 when not given. Estimates without
-- bias from n rollouts of which c pass: pass@k = 1 - C(n-c, k) / C(n, k), and best-of-k is the
-- expected largest of k rewards drawn without replacement; means over the groups with n >= k.
-- validate=true takes validation rollouts instead. Rollouts without a reward (or with nan) and
-- superseded attempts are left out.
with prompts as (
    select
        experiment, run_id, step,
        count(*) as n,
        count(*) filter (reward >= coalesce($threshold::double, 1.0)) as c,
        list(reward order by reward) as rewards
    from trajectories
    where not isnan(reward) and (group_id is not null or sample_index is not null)
        and ($run is null or run_id = $run) and ($experiment is null or experiment = $experiment)
        and validate = coalesce($validate::boolean, false)
    group by experiment, run_id, step, group_id, if(group_id is null, sample_index, null)
)
select
    experiment,
    run_id,
    step,
    k,
    count(*) as prompts,
    avg(if(n - c < k, 1.0, 1 - exp(
        lgamma(n - c + 1) - lgamma(n - c - k + 1) - lgamma(n + 1) + lgamma(n - k + 1)
    ))) as pass_at_k,
    -- The i-th smallest is the largest of k in C(i-1, k-1) of C(n, k) cases.
    avg(list_sum(list_transform(range(k, n + 1), lambda i: rewards[i] * k / i * exp(
        lgamma(i + 1) - lgamma(i - k + 1) - lgamma(n + 1) + lgamma(n - k + 1)
    )))) as best_of_k
from (select *, unnest(range(1, n + 1)) as k from prompts)
group by experiment, run_id, step, k
order by experiment, run_id, step, k
