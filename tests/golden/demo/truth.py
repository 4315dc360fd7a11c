"""The truth about the demo's rollouts, from the lists that the trainer learns from.

A rollout is one list of ids with a mask, 1 where the model wrote the token, and log-probabilities;
nothing here comes from the store or from its reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean
from typing import Any


@dataclass
class Seen:
    """One rollout as the trainer saw it."""

    step: int
    trace_id: str
    group_id: str
    validate: bool
    ids: list[int]
    mask: list[float]
    logprobs: list[float]
    reward: float
    tool_errors: int
    trainer: list[float] | None = None
    """Log-probability of each generated token by the trainer; None: it was not trained on."""
    turns: list[tuple[list[int], list[float]]] = field(init=False)
    """Ids and log-probabilities of each stretch that the model wrote."""

    def __post_init__(self) -> None:
        self.turns = []
        places = range(len(self.ids))
        for written, stretch in groupby(places, lambda place: self.mask[place] != 0):
            if written:
                here = list(stretch)
                ids = [self.ids[place] for place in here]
                self.turns.append((ids, [self.logprobs[place] for place in here]))

    @property
    def written(self) -> list[int]:
        """Return the tokens that the model wrote."""
        return [token for ids, _ in self.turns for token in ids]

    def tool_calls(self, decode: Callable[[list[int]], str]) -> int:
        """Return the number of calls of the calculator: every whole call gets an answer."""
        texts = (decode(ids) for ids, _ in self.turns)
        return sum(text.startswith("<call>") and text.endswith("<end>") for text in texts)


def by_step(
    rollouts: Iterable[Seen], decode: Callable[[list[int]], str]
) -> dict[str, list[dict[str, Any]]]:
    """Return what named queries must say, step by step."""
    steps: dict[int, list[Seen]] = defaultdict(list)
    for rollout in rollouts:
        steps[rollout.step].append(rollout)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for step, seen in sorted(steps.items()):
        training = [rollout for rollout in seen if not rollout.validate]
        validation = [rollout.reward for rollout in seen if rollout.validate]
        rewards = [rollout.reward for rollout in training]
        lengths = [len(rollout.written) for rollout in training]
        rows["reward_by_step"].append({
            "step": step, "trajectories": len(training), "mean_reward": fmean(rewards),
            "min_reward": min(rewards), "max_reward": max(rewards),
            "validation_reward": fmean(validation) if validation else None,
        })  # fmt: skip
        rows["length_by_step"].append({
            "step": step, "mean_tokens": fmean(lengths), "max_tokens": max(lengths),
            "mean_turns": fmean(len(rollout.turns) for rollout in training),
        })  # fmt: skip
        calls = [rollout.tool_calls(decode) for rollout in training]
        failures = sum(rollout.tool_errors for rollout in training)
        rows["tool_calls_by_step"].append({
            "step": step, "tool_calls": sum(calls), "max_tool_calls": max(calls),
            "failed_share": failures / sum(calls) if sum(calls) else None, "derived_share":
            0.0 if sum(calls) else None,
        })  # fmt: skip
        logprobs = [value for rollout in training for _, of in rollout.turns for value in of]
        rows["entropy_by_step"].append({
            "step": step, "turns": sum(len(rollout.turns) for rollout in training),
            "tokens": len(logprobs), "mean_surprise": -fmean(logprobs),
        })  # fmt: skip
        groups: dict[str, list[float]] = defaultdict(list)
        for rollout in training:
            groups[rollout.group_id].append(rollout.reward)
        same = sum(len(set(values)) == 1 for values in groups.values())
        rows["group_spread"].append({
            "step": step, "groups": len(groups), "zero_variance_groups": same,
            "mean_reward": fmean(map(fmean, groups.values())),
        })  # fmt: skip
        rows["recording_gaps"].append({"step": step, "trajectories": len(training), "unplaced": 0})
    return rows
