"""A GRPO trainer with a tiny model, which keeps what passed through it beside the hook."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.verl.agent_loops.model import write_model

QUESTIONS = [f"What is {a} plus {b}?" for a in range(3) for b in range(3)]
HAS_TOOLS = hasattr(GRPOTrainer, "_tool_call_loop")
"""Whether TRL calls tools; 0.24 does not."""
LAST_IDS = range(2, 60) if HAS_TOOLS else (2,)
"""Tokens that end a completion, so many that some of few tokens end; 0.24 knows one alone."""
_OFTEN_THE_LAST = {} if HAS_TOOLS else {"sequence_bias": [[[2], 4.0]]}


class ObservedTrainer(GRPOTrainer):
    """Keeps copies of what TRL's own methods take and give."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.launches: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        super().__init__(*args, **kwargs)

    def _generate(self, prompts: list[Any], *images: Any) -> Any:
        result = super()._generate(prompts, *images)
        names = ["prompt_ids", "completion_ids", "tool_mask", "completions", "logprobs"]
        if not HAS_TOOLS:
            names[2:] = ["count", "logprobs"]
        found = dict(zip(names, copy.deepcopy(result), strict=False))
        self.launches[-1] |= {"prompts": copy.deepcopy(prompts), **found}
        return result

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, *ids: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, *ids)
        self.launches[-1] |= {"rewards": rewards.clone(), "completions": completions}
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        seen = {
            "inputs": copy.deepcopy(inputs),
            "step": self.state.global_step,
            "validate": not self.model.training,
        }
        self.launches.append(seen)
        batch = super()._generate_and_score_completions(inputs)
        seen["batch"] = {name: value.clone() for name, value in batch.items()}
        return batch

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        if self.model.training:
            kept = {name: value.clone() for name, value in inputs.items()}
            self.updates.append({"step": self.state.global_step, "batch": kept})
        return super()._compute_loss(model, inputs)

    def log(self, logs: dict[str, Any], *args: Any) -> None:
        super().log(logs, *args)
        logged = dict(self.state.log_history[-1])
        self.logged.append((logged.pop("step"), logged))


def long(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward for every completion."""
    return [float(len(ids)) for ids in completion_ids]


def small(completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float | None]:
    """A reward for some completions; the dataset's columns are there."""
    return [
        None if ids[0] % 3 == 0 else -float(ids[0]) - row
        for ids, row in zip(completion_ids, index, strict=True)
    ]


def make_model(folder: Path) -> Path:
    """A model of a few thousand parameters, whose completions end now and then."""
    write_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = list(LAST_IDS)
    model.save_pretrained(folder)
    return folder


def make_trainer(
    model: Path,
    output: Path,
    *,
    rows: list[dict[str, Any]] | None = None,
    kind: type[GRPOTrainer] = ObservedTrainer,
    reward_funcs: Any = (long, small),
    tokenizer: Any = None,
    more: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A trainer on the CPU; `settings` are those of `GRPOConfig`, `more` its other arguments."""
    rows = rows or [
        {"prompt": [{"role": "user", "content": text}], "index": place}
        for place, text in enumerate(QUESTIONS)
    ]
    chosen = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 5,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "beta": 0.1,
        "seed": 7,
        "generation_kwargs": _OFTEN_THE_LAST,
        **settings,
    }
    args = GRPOConfig(
        output_dir=str(output),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **chosen,
    )
    dataset = Dataset.from_list(rows)
    return kind(
        model=AutoModelForCausalLM.from_pretrained(model),
        reward_funcs=list(reward_funcs),
        args=args,
        train_dataset=dataset,
        eval_dataset=dataset.select(range(2)),
        processing_class=tokenizer or AutoTokenizer.from_pretrained(model),
        **(more or {}),
    )


def weights(trainer: Any) -> torch.Tensor:
    """All parameters of the policy as one vector."""
    return torch.cat([one.detach().flatten() for one in trainer.model.parameters()])
