"""One rollout of NeMo-RL as a trajectory: its messages, steps of the environment, and reward.

A rollout is a list of messages, each with its token ids: those of the prompt, then in turn what the
model generated, with its logprobs, and what the environment said.
"""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from localtrace.record import active
from localtrace.record.capture import Beginning, begin_trajectory, end_trajectory
from localtrace.record.scope import Scope, current
from localtrace.record.session import outcome
from localtrace.trainer_hooks.environment import trace_id_in_job
from localtrace.trainer_hooks.generations import record_generation, record_tool
from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.nemo_rl.job import training

OP, STEP_OP, SOURCE = "nemo_rl.generate", "nemo_rl.environment", "nemo_rl.rollout"
_REMEMBERED_MAX = 262_144


class Event(NamedTuple):
    """A generation, or a step of the environment, of one rollout."""

    start_ns: int
    duration_ns: int
    values: dict[str, Any]
    """Facts besides the messages, such as a reward or sampling parameters."""


@dataclass(slots=True)
class Events:
    """The events of one rollout, in their order."""

    generations: list[Event] = field(default_factory=list)
    steps: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished rollout."""

    messages: Sequence[Mapping[str, Any]]
    prompt_length: int
    """Number of messages that were there before it."""
    reward: float | None
    truncated: bool
    task: str | None
    facts: Mapping[str, Any]
    """Facts that the environment was told about it."""
    events: Events


class Occurrences:
    """Counts of equal contents, of which the oldest are forgotten."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()

    def next(self, content: str) -> int:
        """Return how many times a content came before."""
        before = self._counts.get(content, 0)
        self._counts[content] = before + 1
        self._counts.move_to_end(content)
        if len(self._counts) > _REMEMBERED_MAX:
            self._counts.popitem(last=False)
        return before


_recorded = Occurrences()


def content_of(token_ids: Sequence[int], logprobs: Sequence[float]) -> str:
    """Return a digest of a rollout's tokens and logprobs, as the rollout and the trainer have them.

    Args:
        logprobs: one for each token; 0.0 where it was not generated.
    """
    digest = hashlib.sha256(array("q", token_ids).tobytes())
    digest.update(array("f", logprobs).tobytes())
    return digest.hexdigest()


@harmless
def record_sample(sample: Sample, beginning: Beginning, batch_start_ns: int) -> str | None:
    """Record a finished rollout; return its trace id, if it was recorded."""
    recorder = active.recorder
    if recorder is None:
        return None
    ids = [_numbers(one["token_ids"]) for one in sample.messages]
    logprobs = [
        _numbers(one["generation_logprobs"]) if "generation_logprobs" in one else [0.0] * len(own)
        for one, own in zip(sample.messages, ids, strict=True)
    ]
    content = content_of([*chain(*ids)], [*chain(*logprobs)])
    # Nothing joins a validation, which must not count among equal rollouts of the training.
    trace_id = (
        os.urandom(16).hex()
        if beginning.validate
        else trace_id_in_job("nemo_rl", content, _recorded.next(content))
    )
    events = sample.events
    start_ns = events.generations[0].start_ns if events.generations else batch_start_ns
    state = begin_trajectory(
        recorder, bytes.fromhex(trace_id), beginning, time.time_ns() - start_ns
    )
    token = current.set(Scope(state, None))
    try:
        turns = _record_turns(sample, ids, logprobs, batch_start_ns)
    finally:
        current.reset(token)
    values = _values(sample, turns)
    state.values |= {name: msgspec.Raw(recorder.values.encode(one)) for name, one in values.items()}
    state.ended = True
    if state.dropped is None:
        last = (events.steps or events.generations)[-1:]
        end_ns = last[0].start_ns + last[0].duration_ns if last else time.time_ns()
        end_trajectory(recorder, state, None, time.time_ns() - end_ns)
    _record_mask(sample, ids, trace_id, beginning.step)
    return trace_id


def _record_turns(
    sample: Sample, ids: list[list[int]], logprobs: list[list[float]], batch_start_ns: int
) -> int:
    """Record the turns and the steps between them; return how many turns there were."""
    events, turns, steps = sample.events, 0, 0
    times_of = {} if events.generations else {"times_of": "batch"}
    whole = Event(batch_start_ns, time.time_ns() - batch_start_ns, times_of)
    for number in range(sample.prompt_length, len(sample.messages)):
        message = sample.messages[number]
        if _is_generated(message):
            event = events.generations[turns] if turns < len(events.generations) else whole
            inputs: dict[str, Any] = {"prompt_ids": [*chain(*ids[:number])]}
            if turns == 0:
                inputs["messages"] = [_said(one) for one in sample.messages[:number]]
            outputs: dict[str, Any] = {"output_ids": ids[number], "text": message.get("content")}
            if "generation_logprobs" in message:
                outputs["output_logprobs"] = logprobs[number]
            if training.weight_version is not None:
                outputs["weight_version"] = str(training.weight_version)
            given = dict(event.values)
            outputs |= {
                name: given.pop(name) for name in ("finish_reason", "times_of") if name in given
            }
            record_generation(
                OP, start_ns=event.start_ns, duration_ns=event.duration_ns,
                inputs=inputs | given, outputs=outputs,
            )  # fmt: skip
            turns += 1
        elif steps < len(events.steps):
            event = events.steps[steps]
            record_tool(
                STEP_OP, start_ns=event.start_ns, duration_ns=event.duration_ns,
                inputs={"task": sample.task}, outputs={**_said(message), **event.values},
            )  # fmt: skip
            steps += 1
    return turns


def _is_generated(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant"


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: message[name] for name in ("role", "content") if name in message}


def _values(sample: Sample, turns: int) -> dict[str, Any]:
    parts: dict[str, float] = {}
    for step in sample.events.steps:
        reward = step.values.get("reward")
        for name, part in (reward if isinstance(reward, dict) else {}).items():
            parts[name] = parts.get(name, 0.0) + part
    found = {
        "reward": sample.reward,
        "reward_extra_info": parts or None,
        "num_turns": turns,
        "truncated": sample.truncated,
        "task": sample.task,
        "ground_truth": sample.facts.get("ground_truth"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _record_mask(sample: Sample, ids: list[list[int]], trace_id: str, step: int | None) -> None:
    """Record which tokens of the response were generated, where some were not."""
    flags = [
        int(_is_generated(message))
        for message, own in zip(sample.messages, ids, strict=True)
        for _ in own
    ][sum(map(len, ids[: sample.prompt_length])) :]
    if flags and not all(flags):
        outcome(trace_id, step=step, source=SOURCE, response_mask=flags)


def _numbers(values: Any) -> list[Any]:
    """Return the numbers of a tensor, those of half precision as they are."""
    return list(values.tolist() if hasattr(values, "tolist") else values)
