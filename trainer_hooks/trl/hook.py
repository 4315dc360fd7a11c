"""The hook into one GRPO trainer: replacements of seven of its methods.

No callback of TRL sees completions, so the methods are replaced on the instance; TRL's classes and
modules stay as they are. The replacements look at arguments and results. They never raise into the
trainer, draw no random numbers and change no tensor.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from localtrace.errors import ConfigError
from localtrace.record.session import log_metrics
from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.trl.batch_outcomes import (
    Trained,
    record_batch,
    record_trained,
    rollouts_of,
)
from localtrace.trainer_hooks.trl.generation_batch import Finished, GenerationBatch, record_within
from localtrace.trainer_hooks.trl.job import start_recording

METHODS = (
    "_prepare_inputs", "_generate_and_score_completions", "_generate", "_generate_single_turn",
    "_tool_call_loop", "_calculate_rewards", "log",
)  # fmt: skip
_ROLLOUTS_KEY = "localtrace_rollouts"
"""Extra key in TRL's batch that keeps each row's rollout while TRL shuffles and splits it."""
_recorded: weakref.WeakSet[Any] = weakref.WeakSet()


def record(trainer: Any) -> None:
    """Record what a `trl.GRPOTrainer` generates, scores and trains on.

    Call it in every process of the job, after making the trainer and before `train()` or
    `evaluate()`. The main process must record already (`localtrace.init`) or have LOCALTRACE_STORE
    set; the others record into the same run. Otherwise one line says that nothing is recorded.

    Raises:
        ConfigError: the trainer lacks methods that TRL's GRPO trainer has.
    """
    missing = [name for name in METHODS if not callable(getattr(trainer, name, None))]
    if missing:
        raise ConfigError(
            f"cannot record a {type(trainer).__name__} that has no {missing[0]}: use the "
            "GRPOTrainer of trl 1.16"
        )
    if trainer not in _recorded and start_recording(trainer):
        _recorded.add(trainer)
        Hook(trainer).enter()


class Hook:
    """State that the replaced methods of one trainer share."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._batches = 0
        self._batch: GenerationBatch | None = None
        """The generation batch under way."""
        self._messages: Sequence[Any] = ()
        """Prompts of the batch, by row; tool results are added as they arrive."""
        self._parts: list[list[Trained]] = []
        """The rollouts in each part of TRL's buffer."""
        self._step: int | None = None
        """The step at which the rollouts in the buffer were launched."""

    def enter(self) -> None:
        """Replace the trainer's methods by ones that call this hook's."""
        self._around("_prepare_inputs", after=self._use)
        self._around("_generate_and_score_completions", self._begin, self._end)
        self._around("_generate", self._prompt, self._custom_rollout)
        self._around("_generate_single_turn", after=self._turn)
        self._around("_tool_call_loop", self._tools)
        self._around("_calculate_rewards", after=self._score)
        self._around("log", after=self._log)

    def _around(
        self,
        name: str,
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
    ) -> None:
        original = getattr(self._trainer, name)
        begin, end = harmless(before or _nothing), harmless(after or _nothing)

        @functools.wraps(original)
        def entered(*args: Any, **kwargs: Any) -> Any:
            begin(*args, **kwargs)
            start_ns, begun_ns = time.time_ns(), time.perf_counter_ns()
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                duration_ns = time.perf_counter_ns() - begun_ns
                end(Finished(start_ns, duration_ns, error=error), *args, **kwargs)
                raise
            end(Finished(start_ns, time.perf_counter_ns() - begun_ns, result), *args, **kwargs)
            return result

        setattr(self._trainer, name, entered)

    # -- one generation batch, from the dataset's rows to what is trained on -----------------

    def _begin(self, inputs: Sequence[dict[str, Any]]) -> None:
        self._batch = None
        if self._trainer.model.training:  # evaluation leaves TRL's buffer as it is
            self._parts = []
        self._batches += 1
        self._batch = GenerationBatch(self._trainer, inputs, self._batches)

    def _end(self, call: Finished, inputs: Sequence[dict[str, Any]]) -> None:
        batch, self._batch, self._messages = self._batch, None, ()
        if batch is None:
            return
        batch.end(call.error)
        if call.error is None:
            record_batch(batch, self._trainer.reward_func_names, call.result)
            if not batch.validate:
                self._step = batch.step
                call.result[_ROLLOUTS_KEY] = rollouts_of(batch, call.result)

    def _prompt(self, prompts: Sequence[Any]) -> None:
        self._messages = prompts

    def _turn(self, call: Finished, prompt_ids: Sequence[Any], *_: Any, **__: Any) -> None:
        if self._batch is not None and self._trainer.rollout_func is None:
            completion_ids, logprobs = call.result or (None, None)
            self._batch.record_turns(call, self._messages, prompt_ids, completion_ids, logprobs)

    def _custom_rollout(self, call: Finished, prompts: Sequence[Any]) -> None:
        """Record the result of a `rollout_func`, which generates by itself, as one turn."""
        if self._batch is None or self._trainer.rollout_func is None or call.error is not None:
            return
        prompt_ids, completion_ids, _, _, logprobs, *_ = call.result
        self._batch.record_turns(call, prompts, prompt_ids, completion_ids, logprobs)

    def _tools(self, prompts: Sequence[Any], *_: Any, **__: Any) -> None:
        self._messages = prompts
        if self._batch is not None:
            for tools in (self._trainer._sync_tool_dicts, self._trainer._async_tool_dicts):
                # TRL calls a row's tools through the row's dict.
                for row, by_name in zip(self._batch.rows, tools, strict=True):
                    by_name.update({n: record_within(row, tool) for n, tool in by_name.items()})

    def _score(
        self, call: Finished, inputs: Any, prompts: Any, completions: Any, completion_ids: Any
    ) -> None:
        if self._batch is not None and call.error is None:
            self._batch.score(call.result, completion_ids)

    def _use(self, call: Finished, batch: Any) -> None:
        """Record that TRL is about to train on a part of its buffer; evaluation has none."""
        buffer = self._trainer._buffered_inputs or ()
        if any(_ROLLOUTS_KEY in part for part in buffer):
            # Removed, so that the loss sees no key but TRL's own.
            self._parts = [part.pop(_ROLLOUTS_KEY) for part in buffer]
        for part, rollouts in zip(buffer, self._parts, strict=False):
            if part is call.result:
                trained_step = self._trainer.state.global_step
                record_trained(rollouts, step=self._step, trained_step=trained_step)

    def _log(self, call: Finished, logs: dict[str, Any], *_: Any, **__: Any) -> None:
        if self._trainer.accelerator.is_main_process:
            numbers = {n: v for n, v in logs.items() if isinstance(v, int | float)}
            log_metrics(numbers, step=self._trainer.state.global_step)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, where a replaced method needs no action before or after the call."""
