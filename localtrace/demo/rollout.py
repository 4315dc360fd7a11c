"""The agent loop: one conversation of the policy with the calculator is one trajectory."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field

import localtrace
from localtrace.demo.engine import Engine
from localtrace.demo.task import CalculatorError, Problem, calculate, grade
from localtrace.demo.vocabulary import decode, encode

MAX_TURNS = 5
MAX_NEW_TOKENS = 12
TURN = re.compile(r"<(call|answer)>(.*)<end>")


@dataclass(frozen=True, slots=True)
class Task:
    """One rollout to do."""

    problem: Problem
    step: int
    rollout_n: int
    group_id: str
    validate: bool = False


@dataclass(slots=True)
class Rollout:
    """The trainer's data of one rollout; `ids`, `mask` and `logprobs` have one item per token."""

    trace_id: str
    group_id: str
    validate: bool
    ids: list[int] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    """1 where the model wrote the token, 0 for the question and the tool's replies."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability at sampling; 0 where the mask is 0."""
    reward: float = 0.0
    tool_errors: int = 0

    def read(self, text: str) -> None:
        """Append text that the model did not write."""
        self._append(encode(text), mask=0.0)

    def write(self, ids: list[int], logprobs: list[float]) -> None:
        """Append tokens that the model wrote."""
        self._append(ids, mask=1.0, logprobs=logprobs)

    def _append(self, ids: list[int], mask: float, logprobs: list[float] | None = None) -> None:
        self.ids += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)


@localtrace.op(kind="tool")
def calculator(expression: str) -> int:
    """Compute `number sign number`: the tool that the policy may call."""
    return calculate(expression)


@localtrace.op(kind="reward")
def score(problem: Problem, answer: str | None, tool_errors: int) -> float:
    """Return the reward of a conversation; `answer` is None if the policy gave none."""
    return grade(problem, answer, tool_errors)


async def roll_out(engine: Engine, task: Task) -> Rollout:
    """Let the policy work on one problem until it answers or its turns are used up."""
    with localtrace.trajectory(
        step=task.step,
        sample_index=task.problem.sample_index,
        rollout_n=task.rollout_n,
        group_id=task.group_id,
        validate=task.validate,
        agent="calculator",
        data_source=task.problem.data_source,
    ) as trajectory:
        rollout = Rollout(trajectory.trace_id, task.group_id, task.validate)
        answer = await _converse(engine, task, rollout)
        rollout.reward = score(task.problem, answer, rollout.tool_errors)
        trajectory.set(
            reward=rollout.reward,
            failed_calls=rollout.tool_errors,
            on_policy_version=task.step - 1,
            ground_truth=str(task.problem.partial_sums()[-1]),
        )
    return rollout


async def _converse(engine: Engine, task: Task, rollout: Rollout) -> str | None:
    """Alternate turns of the policy and the calculator; return the policy's answer."""
    rollout.read(f"<user>{task.problem.question}<assistant>")
    sampling = {"temperature": 0.0 if task.validate else 1.0, "max_new_tokens": MAX_NEW_TOKENS}
    for _ in range(MAX_TURNS):
        turn = await engine.generate(prompt_ids=rollout.ids, sampling_params=sampling)
        rollout.write(turn["output_ids"], turn["output_logprobs"])
        match = TURN.fullmatch(decode(turn["output_ids"]))
        if match is None:
            return None
        if match[1] == "answer":
            return match[2]
        rollout.read(f"<tool>{_reply(match[2], rollout)}<assistant>")
    return None


def _reply(expression: str, rollout: Rollout) -> str:
    """Return what the policy reads after its call: the result or `<error>`."""
    try:
        return str(calculator(expression))
    except CalculatorError:
        rollout.tool_errors += 1
        return "<error>"


async def roll_out_all(engine: Engine, tasks: list[Task]) -> list[Rollout]:
    """Do all tasks at once in one event loop; return rollouts in the order of the tasks."""
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(roll_out(engine, task)) for task in tasks]
        group.create_task(engine.serve())
    return [one.result() for one in running]
