"""The expected record of every rollout, read from the results of verl."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from tests.verl.agent_loops.job import RESPONSE_TOKENS, ROLLOUTS, WORKERS_V0
from tests.verl.agent_loops.results import Batch, Result


@dataclass(frozen=True)
class Output:
    """One output of an agent loop, without padding."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Rollout:
    """One rollout as verl's own output shows it."""

    trace_id: str
    seed: str
    """Seed of its requests."""
    columns: dict[str, Any]
    """Values in the table of trajectories."""
    attributes: dict[str, Any]
    score: float
    """Reward that verl put on the last token, a float32."""
    outputs: list[Output]


def rollouts(result: Result, trainer: str) -> list[Rollout]:
    """Every rollout of the trainer's batches."""
    read, batches = (_rows_v0, result.v0) if trainer == "v0" else (_sessions_v1, result.v1)
    return [rollout for batch in batches for rollout in read(batch)]


def _rows_v0(batch: Batch) -> list[Rollout]:
    from verl.experimental.agent_loop.agent_loop import get_trajectory_info

    share = len(batch.rows) // WORKERS_V0
    infos = []
    for first in range(0, len(batch.rows), share):
        indexes = [row["index"] for row in batch.rows[first : first + share]]
        infos += asyncio.run(get_trajectory_info(batch.step, indexes, batch.validate))
    return [_row_v0(batch, at, infos[at]) for at in range(len(batch.rows))]


def _row_v0(batch: Batch, at: int, info: dict[str, Any]) -> Rollout:
    row = batch.rows[at]
    tensors = {name: tensor[at] for name, tensor in batch.tensors.items()}
    columns = {name: column[at] for name, column in batch.columns.items()}
    mask = tensors["attention_mask"].astype(bool)
    width = len(tensors["prompts"])
    response = mask[width:]
    output = Output(
        tensors["prompts"][mask[:width]].tolist(),
        tensors["responses"][response].tolist(),
        tensors["response_mask"][response].tolist(),
        tensors["rollout_log_probs"][response].tolist(),
    )
    return Rollout(
        trace_id=columns["localtrace_trace_id"],
        seed=f"{row['uid']}/{at}",
        columns=_columns(row, batch, info["rollout_n"]),
        attributes={
            **_attributes(batch, row, columns, columns["__num_turns__"]),
            "truncated": len(output.response_ids) == RESPONSE_TOKENS,
        },
        score=float(tensors["rm_scores"].sum()),
        outputs=[output],
    )


def _sessions_v1(batch: Batch) -> list[Rollout]:
    count = 1 if batch.validate else ROLLOUTS
    return [_session_v1(batch, row, session) for row in batch.rows for session in range(count)]


def _session_v1(batch: Batch, row: dict[str, Any], session: int) -> Rollout:
    start = f"{row['uid']}_{session}_"
    keys = sorted(key for key in batch.records if key.startswith(start))
    records = [batch.records[key] for key in keys]
    last, tag = records[-1], batch.tags[keys[-1]]
    (trace_id,) = {record["extra_fields"]["localtrace_trace_id"] for record in records}
    attributes = _attributes(batch, row, {**last["extra_fields"], **tag}, last["num_turns"])
    attributes["session_id"] = session
    attributes["truncated"] = len(last["responses"]) == RESPONSE_TOKENS
    if len(records) > 1:
        attributes["outputs"] = len(records)
    return Rollout(
        trace_id=trace_id,
        seed=f"{row['uid']}/{session}",
        columns=_columns(row, batch, session),
        attributes=attributes,
        score=float(last["rm_scores"].sum()),
        outputs=[
            Output(
                *(
                    record[name].tolist()
                    for name in ("prompts", "responses", "response_mask", "rollout_log_probs")
                )
            )
            for record in records
        ],
    )


def _columns(row: dict[str, Any], batch: Batch, rollout_n: int) -> dict[str, Any]:
    return {
        "step": batch.step,
        "validate": batch.validate,
        "sample_index": str(row["index"]),
        "rollout_n": rollout_n,
        "group_id": row["uid"],
        "agent": row["agent_name"],
        "data_source": row["data_source"],
        "name": "agent_loop",
        "status": "ok",
        "error": None,
    }


def _attributes(
    batch: Batch, row: dict[str, Any], values: dict[str, Any], num_turns: Any
) -> dict[str, Any]:
    names = (
        "reward_extra_info", "tool_rewards", "turn_scores", "min_global_steps", "max_global_steps",
    )  # fmt: skip
    return {
        "on_policy_version": batch.step - (not batch.validate),
        "ground_truth": row["reward_model"]["ground_truth"],
        "num_turns": int(num_turns),
        **{name: values[name] for name in names},
    }
