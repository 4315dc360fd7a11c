"""One generation batch of TRL: a trajectory for each completion of this process."""

from __future__ import annotations

import contextvars
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from localtrace.record.capture import trajectory
from localtrace.record.op import op
from localtrace.record.scope import current
from localtrace.trainer_hooks.generations import record_generation

_OP = "trl.generate"
_INDEX_NAMES = ("index", "id")
"""Dataset columns that identify a row. The first one present is used."""
_SAMPLING_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished call of one of the trainer's methods."""

    start_ns: int
    duration_ns: int
    result: Any = None
    error: BaseException | None = None


class Row:
    """One completion under way, with its trajectory open in a context of its own."""

    def __init__(self, **fields: Any) -> None:
        self.trajectory = trajectory(**fields)
        self.context = contextvars.copy_context()
        self.context.run(self.trajectory.__enter__)
        self.ids: list[int] = []
        """Ids of the prompt and the completion so far."""
        self.length = 0
        """Tokens of the whole completion, tool results included."""
        self.rewards: list[float | None] = []
        """Reward of each reward function; None where it gave none."""


class GenerationBatch:
    """One call of the trainer that generates and scores completions.

    Args:
        inputs: this process's dataset rows, one per completion, so a prompt is repeated.
        number: number of the call, the same in all processes.
    """

    def __init__(self, trainer: Any, inputs: Sequence[dict[str, Any]], number: int) -> None:
        self._trainer = trainer
        self.step: int = trainer.state.global_step
        self.validate = not trainer.model.training
        self._first = trainer.accelerator.process_index * len(inputs)
        """Position of the first row among those of all processes."""
        self._sampling_params = _sampling_params(trainer)
        self._last_ids = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        """Ids that end a completion. One that ends with another id was cut off."""
        size = trainer.num_generations_eval if self.validate else trainer.num_generations
        self.rows = [
            self._open(fields, number, *divmod(self._first + place, size))
            for place, fields in enumerate(inputs)
        ]
        self._continued = self.rows
        """Rows of the newest generation. The next one continues some of these, in order."""
        self._ended = False

    def _open(self, fields: dict[str, Any], number: int, group: int, rollout_n: int) -> Row:
        row = Row(
            step=self.step,
            sample_index=next((fields[name] for name in _INDEX_NAMES if name in fields), None),
            rollout_n=rollout_n,
            group_id=f"{self.step}-{number}-{group}",
            validate=self.validate,
            name=type(self._trainer).__name__,
            agent=fields.get("environment"),
            data_source=fields.get("data_source"),
        )
        row.trajectory.set(on_policy_version=self.step)  # TRL generates with the newest weights
        columns = {name: value for name, value in fields.items() if name != "prompt"}
        if columns:
            row.trajectory.set(dataset_row=columns)
        return row

    def record_turns(
        self,
        call: Finished,
        messages: Sequence[Any],
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]] | None,
        logprobs: Sequence[Sequence[float | None]] | None,
    ) -> None:
        """Record one generation of all rows, or of those that continue after a tool's result.

        Args:
            call: the call for the whole batch; every row gets its times.
            messages: prompt of every row of the batch, as text or a list of messages.
            prompt_ids: prompt ids of the rows that generate.
            completion_ids: ids that each of them generated; None if the call failed.
            logprobs: logprobs of the generated tokens, if TRL has them.
        """
        prompts = dict(zip(self.rows, messages, strict=True))
        candidates = iter(self._continued)
        self._continued = []
        for place, ids in enumerate(prompt_ids):
            row = next(row for row in candidates if row.ids == list(ids[: len(row.ids)]))
            self._continued.append(row)
            prompt = prompts[row]
            inputs = {
                "prompt_ids": list(ids),
                "prompt" if isinstance(prompt, str) else "messages": prompt,
                "sampling_params": self._sampling_params,
            }
            outputs = None
            if completion_ids is not None:
                generated = list(completion_ids[place])
                row.ids = [*ids, *generated]
                outputs = self._outputs(generated, logprobs[place] if logprobs else None)
            row.context.run(
                record_generation,
                _OP,
                start_ns=call.start_ns,
                duration_ns=call.duration_ns,
                inputs=inputs,
                outputs=outputs,
                error=call.error,
            )

    def _outputs(self, ids: list[int], logprobs: Sequence[float | None] | None) -> dict[str, Any]:
        outputs: dict[str, Any] = {"output_ids": ids, "weight_version": str(self.step)}
        if logprobs is not None:
            outputs["output_logprobs"] = logprobs
        if ids:
            outputs["finish_reason"] = "stop" if ids[-1] in self._last_ids else "length"
        return outputs

    def score(self, rewards: Any, completion_ids: Sequence[Sequence[int]]) -> None:
        """Note the rewards and end the trajectories.

        Args:
            rewards: tensor of shape (completions of all processes, reward functions), nan where a
                function gave none.
            completion_ids: ids of this process's rows, tool results included.
        """
        mine = rewards[self._first : self._first + len(self.rows)].detach().cpu()
        # Single precision, as TRL sums them.
        totals = (mine * self._trainer.reward_weights.cpu()).nansum(dim=1).tolist()
        for row, values, total, ids in zip(
            self.rows, mine.tolist(), totals, completion_ids, strict=True
        ):
            row.length = len(ids)
            row.rewards = [None if math.isnan(value) else value for value in values]
            if any(value is not None for value in row.rewards):
                row.trajectory.set(reward=total)
        self.end(None)

    def end(self, error: BaseException | None) -> None:
        """End the trajectories, once."""
        if self._ended:
            return
        self._ended = True
        kind = None if error is None else type(error)
        for row in self.rows:
            row.context.run(row.trajectory.__exit__, kind, error, None)


def record_within(row: Row, tool: Callable[..., Any]) -> Callable[..., Any]:
    """Return the tool so that its calls are recorded in the row's trajectory."""
    recorded, scope = op(kind="tool")(tool), row.context[current]

    @functools.wraps(tool)
    def call(*args: Any, **kwargs: Any) -> Any:
        token = current.set(scope)
        try:
            return recorded(*args, **kwargs)
        finally:
            current.reset(token)

    @functools.wraps(tool)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        token = current.set(scope)
        try:
            return await recorded(*args, **kwargs)
        finally:
            current.reset(token)

    return call_async if inspect.iscoroutinefunction(tool) else call


def _sampling_params(trainer: Any) -> dict[str, Any]:
    params = {name: getattr(trainer, name) for name in _SAMPLING_NAMES}
    return params | (trainer.args.generation_kwargs or {})
