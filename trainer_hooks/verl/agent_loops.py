"""verl's agent loops: one trajectory per rollout, with everything that verl knows of it.

One rollout passes through here four times:

1. `_run_agent_loop` tells what the rollout was started with.
2. `rollout_trace_attr` opens the trajectory.
3. The agent loop returns its output, which is remembered.
4. The trajectory closes and reads the output, which verl has scored by then.
"""

from __future__ import annotations

import contextvars
import sys
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from localtrace.record import active
from localtrace.record.capture import trajectory
from localtrace.record.scope import unrecorded
from localtrace.trainer_hooks.environment import hook_settings
from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.seams import Part
from localtrace.trainer_hooks.tokenizer import keep_tokenizer
from localtrace.trainer_hooks.verl import job, trainer_outcomes
from localtrace.trainer_hooks.verl.keys import TRACE_ID_KEY
from localtrace.trainer_hooks.verl.seams import after, around, before

_AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"
_FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_rollouter"
_EXTRA_NAMES = (
    "reward_extra_info", "tool_rewards", "turn_scores", "min_global_steps", "max_global_steps",
)  # fmt: skip
_STEPS_REMEMBERED = 8
ROLLOUT_FAILED = "the rollout failed"
_BASELINE = "localtrace_baseline"
"""Key in verl's facts of a rollout that says that it is a greedy baseline."""
IDENTITY = ("sample_index", "step", "rollout_n", "validate")
"""Parameters that `rollout_trace_attr` has in every version of verl."""


@dataclass(slots=True)
class Rollout:
    """The arguments of one agent loop, and what it returned."""

    sampling_params: Any
    agent: str | None
    fields: dict[str, Any]
    """The dataset row, with uid and, in V1, session_id."""
    response_length: int | None = None
    """Limit on the tokens of a response."""
    outputs: list[Any] = field(default_factory=list)
    trace_id: str | None = None
    """Trace id of its trajectory; None while it is not recorded."""
    on_policy_version: int | None = None
    """Version that the newest weights have when its step begins; None where it is unknown."""

    @property
    def is_baseline(self) -> bool:
        """Whether verl only compares others with it, and never trains on it, as REMAX does."""
        return _BASELINE in self.fields.get("trajectory", ())


_rollout: contextvars.ContextVar[Rollout | None] = contextvars.ContextVar("rollout", default=None)
_sampled: contextvars.ContextVar[Any] = contextvars.ContextVar("sampled", default=None)
"""Whether each row of the current batch of V0 is sampled; None: all are."""
_batch_is_joined: contextvars.ContextVar[bool] = contextvars.ContextVar("joined", default=False)
"""Whether the trainer asked for trace ids in the current batch of V0."""
_taken: dict[tuple[Any, bool], set[Any]] = {}
"""Prompts that `max_samples_per_step_per_worker` lets through, by step and validate."""


# -- the rollout's beginning and end -------------------------------------------------------


@around(_AGENT_LOOP, "AgentLoopWorker._run_agent_loop", optional=True)
@around(_AGENT_LOOP, "AgentLoopWorkerBase._run_agent_loop", optional=True)
def _run_agent_loop(self: Any, sampling_params: Any, agent_name: str | None, **fields: Any) -> Part:
    if active.recorder is None:
        yield
        return
    limit = job.select(self.config, "actor_rollout_ref.rollout.response_length")
    token = _rollout.set(Rollout(sampling_params, agent_name, fields, limit))
    try:
        yield
    finally:
        _rollout.reset(token)


def open_rollout(
    sample_index: Any = None,
    step: Any = None,
    rollout_n: Any = None,
    name: str | None = None,
    validate: Any = False,
    trace: bool = True,
) -> RecordedRollout | None:
    """Return the context manager for a rollout; None when this process does not record."""
    if active.recorder is None:
        return None
    rollout = _rollout.get() or Rollout(None, None, {})
    fields = rollout.fields
    live: dict[str, Any] = {}
    if "session_id" in fields:
        # V1 always passes trace=False, and rollout_n=0 for every session of a prompt.
        rollout_n = _plain(fields["session_id"])
        trace = _take_prompt(step, bool(validate), fields.get("uid"))
        live = {"trace": trace, "rollout_n": rollout_n}
    made = trajectory(
        _plain(step),
        _plain(sample_index),
        _plain(rollout_n),
        group_id=_plain(fields.get("uid")),
        validate=bool(validate),
        name=name,
        agent=rollout.agent,
        data_source=_plain(fields.get("data_source")),
    )
    trained_at = None if validate else _plain(step)
    if isinstance(step, int) and step >= 0:  # verl says -1 where rollouts run ahead of training
        # verl numbers weights by the step that made them; validation comes after its step's update.
        rollout.on_policy_version = step if validate else step - 1
    return RecordedRollout(rollout, made if trace else unrecorded(), live, trained_at)


def _take_prompt(step: Any, validate: bool, uid: Any) -> bool:
    """Return whether a prompt of V1 is recorded, by `max_samples_per_step_per_worker`.

    verl ignores that limit in V1. Here the first prompts of a step to reach this worker are taken.
    """
    limit = _prompts_per_step()
    if limit is None:
        return True
    taken = _taken.setdefault((_plain(step), validate), set())
    while len(_taken) > _STEPS_REMEMBERED:
        del _taken[next(iter(_taken))]
    if len(taken) < limit:
        taken.add(uid)
    return uid in taken


@harmless
def _prompts_per_step() -> int | None:
    tracing = sys.modules["verl.utils.rollout_trace"].RolloutTraceConfig.get_instance()
    limit: int | None = tracing.max_samples_per_step_per_worker
    return limit


def _plain(value: Any) -> Any:
    """Return a number or text without its numpy, torch or tensordict wrapper."""
    value = getattr(value, "data", value) if type(value).__name__ == "NonTensorData" else value
    return value.item() if getattr(value, "ndim", None) == 0 else value


class RecordedRollout:
    """The context manager that records one rollout. Entering and leaving never raise."""

    def __init__(
        self, rollout: Rollout, scope: trajectory | unrecorded, live: dict[str, Any], step: Any
    ):
        self.live = live
        """Arguments that verl's own live backend gets instead of the caller's."""
        self._step = step
        """The training step; None for validation."""
        self._rollout = rollout
        self._scope = scope

    @harmless
    def __enter__(self) -> None:
        self._scope.__enter__()
        if isinstance(self._scope, trajectory):
            self._rollout.trace_id = self._scope.trace_id

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(self._scope, trajectory):
            _read_output(self._rollout, self._scope)
        self._leave(kind, error, traceback)
        if self._rollout.is_baseline:
            _note_baseline(self._rollout, self._step)
        if isinstance(error, Exception):
            _note_failure(self._rollout, self._step)

    @harmless
    def _leave(self, *error: Any) -> None:
        self._scope.__exit__(*error)


@harmless
def _note_baseline(rollout: Rollout, step: Any) -> None:
    trace_ids = [rollout.trace_id] if rollout.trace_id else []
    trainer_outcomes.record_fate(
        trace_ids, "baseline", step=step, fate_reason="greedy, to compare sampled rollouts with"
    )


@harmless
def _note_failure(rollout: Rollout, step: Any) -> None:
    """Record the fate of a failed rollout of V1.

    The replay buffer has no row of it, so its fate is not recorded where verl drops its group.
    """
    if "session_id" in rollout.fields and step is not None and trainer_outcomes.is_wanted():
        trace_ids = [rollout.trace_id] if rollout.trace_id else []
        trainer_outcomes.record_fate(trace_ids, "failed", step=step, fate_reason=ROLLOUT_FAILED)


@harmless
def _read_output(rollout: Rollout, opened: trajectory) -> None:
    values: dict[str, Any] = {
        "sampling_params": rollout.sampling_params,
        "session_id": rollout.fields.get("session_id"),
        "on_policy_version": rollout.on_policy_version,
        "ground_truth": job.select(rollout.fields.get("reward_model"), "ground_truth"),
    }
    if rollout.outputs:
        last, limit = rollout.outputs[-1], rollout.response_length
        extra = getattr(last, "extra_fields", None) or {}
        values |= {name: extra.get(name) for name in _EXTRA_NAMES}
        values |= {
            "reward": getattr(last, "reward_score", None),
            "num_turns": getattr(last, "num_turns", None),
            "metrics": getattr(last, "metrics", None),
            "outputs": len(rollout.outputs) if len(rollout.outputs) > 1 else None,
            # An engine reports only its own limit, and verl's vLLM server not even that.
            "truncated": len(last.response_ids) >= limit if limit else None,
        }
    opened.set(**{name: value for name, value in values.items() if value is not None})


@harmless
def note_output(result: Any) -> None:
    """Remember the output of the agent loop."""
    rollout = _rollout.get()
    outputs = list(result) if isinstance(result, list | tuple) else [result]
    if rollout is not None and all(hasattr(output, "extra_fields") for output in outputs):
        rollout.outputs = outputs


@harmless
def mark_output() -> None:
    """Write the trace id into the agent loop's output, for the trainer."""
    rollout = _rollout.get()
    if rollout is None or rollout.trace_id is None:
        return
    joined = "session_id" in rollout.fields or _batch_is_joined.get()
    if joined and hook_settings().trainer_outcomes:
        for output in rollout.outputs:
            output.extra_fields[TRACE_ID_KEY] = rollout.trace_id


# -- whether V0's batches carry trace ids --------------------------------------------------
#
# All rows of a batch must have the same columns. The process that joins the workers' batches asks
# for the column, and fills it with None for workers without this hook.


@before(_AGENT_LOOP, "AgentLoopManager.generate_sequences")
@before(_FULLY_ASYNC, "FullyAsyncAgentLoopManager.generate_sequences_single", optional=True)
def _mark_batch(self: Any, prompts: Any) -> None:
    if job.records_rollouts(self.config) and hook_settings().trainer_outcomes:
        prompts.meta_info[TRACE_ID_KEY] = True


@before(_AGENT_LOOP, "AgentLoopWorker.generate_sequences", optional=True)
@before(_AGENT_LOOP, "AgentLoopWorkerBase.generate_sequences", optional=True)
def _read_mark(batch: Any) -> None:
    meta_info = getattr(batch, "meta_info", {})
    _batch_is_joined.set(bool(meta_info.pop(TRACE_ID_KEY, False)))
    sampled = getattr(batch, "non_tensor_batch", {}).get("__do_sample__")
    _sampled.set(None if meta_info.get("validate") else sampled)


@after(_AGENT_LOOP, "get_trajectory_info", optional=True)
def _mark_baselines(result: list[dict[str, Any]]) -> None:
    """Mark REMAX's greedy baselines, which verl does not tell the agent loops of."""
    sampled = _sampled.get()
    for facts, is_sampled in zip(result, [] if sampled is None else sampled, strict=False):
        if not is_sampled:
            facts[_BASELINE] = True


@before("verl.protocol", "DataProto.concat")
def _fill_gaps(data: list[Any]) -> None:
    columns = [batch.non_tensor_batch for batch in data]
    having = [TRACE_ID_KEY in column for column in columns]
    if any(having) and not all(having):
        import numpy as np

        for batch, has in zip(data, having, strict=True):
            if not has:
                batch.non_tensor_batch[TRACE_ID_KEY] = np.full(len(batch), None, dtype=object)


# -- the worker ----------------------------------------------------------------------------


@around(_AGENT_LOOP, "AgentLoopWorker.__init__", optional=True)
@around(_AGENT_LOOP, "AgentLoopWorkerBase.__init__", optional=True)
def _start_worker(self: Any, config: Any) -> Part:
    job.remember(config)
    yield
    keep_tokenizer(self)
