-- One prompt across steps and runs: rewards, lengths and the best answer each time.
-- params: prompt_hash (optional), sample_index (optional), run (optional), experiment (optional)
-- plot: x=step y=mean_reward by=run_id,validate,prompt_hash
-- needs: prompt_hash=… or sample_index=… <- select 1 where $prompt_hash is not null or $sample_index is not null
-- Name the prompt by its hash or by sample_index. Validation counts. Superseded attempts are left
-- out.
select
    t.experiment,
    t.run_id,
    t.step,
    t.validate,
    any_value(t.prompt_hash) as prompt_hash,
    any_value(t.sample_index) as sample_index,
    count(*) as rollouts,
    avg(t.reward) as mean_reward,
    max(t.reward) as max_reward,
    avg(t.output_tokens) as mean_tokens,
    arg_max(t.trace_id, place) as best_trace_id,
    arg_max_null(a.output_text, place) as best_answer
from (
    -- Missing rewards and nan come before all others, equal ones go by id.
    select *, row(coalesce(nullif(reward, 'nan'), '-inf'), trace_id) as place from trajectories
) as t
left join answers as a on a.trace_id = t.trace_id and a.step is not distinct from t.step
where ($run is null or t.run_id = $run) and ($experiment is null or t.experiment = $experiment)
    and (t.prompt_hash = $prompt_hash or $prompt_hash is null)
    and (t.sample_index = $sample_index::varchar or $sample_index is null)
    and ($prompt_hash is not null or $sample_index is not null)
group by t.experiment, t.run_id, t.step, t.validate
order by t.experiment, t.run_id, t.step, t.validate
