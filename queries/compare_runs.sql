-- Two runs side by side, step by step.
-- params: a, b
-- plot: x=step y=mean_reward_a,mean_reward_b
-- needs: a run whose id is a; localtrace runs lists them <- from runs where run_id = $a
-- needs: a run whose id is b; localtrace runs lists them <- from runs where run_id = $b
-- a and b are run ids. Validation and superseded attempts are left out.
select
    coalesce(x.step, y.step) as step,
    x.trajectories as trajectories_a,
    y.trajectories as trajectories_b,
    x.mean_reward as mean_reward_a,
    y.mean_reward as mean_reward_b,
    y.mean_reward - x.mean_reward as reward_change,
    x.mean_tokens as mean_tokens_a,
    y.mean_tokens as mean_tokens_b,
    x.mean_turns as mean_turns_a,
    y.mean_turns as mean_turns_b
from (
    select
        step, count(*) as trajectories, avg(reward) as mean_reward,
        avg(output_tokens) as mean_tokens, avg(turn_count) as mean_turns
    from trajectories where run_id = $a and not validate group by step
) as x
full join (
    select
        step, count(*) as trajectories, avg(reward) as mean_reward,
        avg(output_tokens) as mean_tokens, avg(turn_count) as mean_turns
    from trajectories where run_id = $b and not validate group by step
) as y on y.step is not distinct from x.step
order by step
