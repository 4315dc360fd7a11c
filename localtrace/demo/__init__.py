"""The demo: a tiny agent that learns to use a calculator by GRPO while every rollout is recorded.

`config` what a run does · `task` the problems, the tool and the reward · `demonstrations` what
the warm-up imitates · `vocabulary` the tokenizer · `policy` the transformer · `engine` batched
sampling · `rollout` the agent loop, with the traced calls · `worker` the rollout processes ·
`grpo` warm-up and learning · `train` the driver · `report` what is shown at the end ·
`run` all of it in order.
"""
