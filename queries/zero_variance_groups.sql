-- Groups that teach nothing under GRPO, because all their rewards are the same.
-- params: step (range, optional), run (optional), experiment (optional)
-- needs: groups, which a group_id, a sample_index or a recorded prompt makes <- from groups
-- needs: rewards, by set(reward=…) in the rollout or outcome(trace_id, reward=…) <- from trajectories where reward is not null
-- Validation and superseded attempts are left out.
select experiment, run_id, step, group_id, sample_index, prompt_hash, n, mean_reward as reward
from groups
where zero_variance and not validate
    and ($step_from is null or step >= $step_from) and ($step_to is null or step <= $step_to)
    and ($run is null or run_id = $run) and ($experiment is null or experiment = $experiment)
order by experiment, run_id, step, sample_index, group_id, prompt_hash
