"""Fields of verifiers' episodes and traces, made of a trajectory's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from localtrace.exporters.verifiers_graph import MessageGraph
from localtrace.read.turns import model_of
from localtrace.types import Span, Trajectory
from localtrace.values.fields import Fields, known

_TASK: dict[str, Any] = {
    "idx": Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)],
    **dict.fromkeys(("id", "name", "description", "system_prompt", "image", "workdir",
                     "agent_user"), str),
    **dict.fromkeys(("network_allow", "network_block"), list[str]),
    "artifact_max_bytes": Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)],
    **dict.fromkeys(("timeout", "resources"), dict[str, float | str]),
    "prompt": str | list[dict[str, Any]],
    "artifacts": list[dict[str, Any]],
}  # fmt: skip
"""Fields of a task's data, and their types; a task has others of any type."""
_RUNTIMES = frozenset({"subprocess", "docker", "prime", "modal", "e2b", "apptainer"})
"""Kinds of places where agents run; without one verifiers would read `prime`."""


def is_own(trajectory: Trajectory) -> bool:
    """Return whether verifiers itself made the trajectory's trace."""
    return text(trajectory.attributes.get("verifiers_version")) is not None


def task_of(trajectory: Trajectory) -> Fields:
    """Return the task: verifiers' own, else one made of the row of the dataset."""
    given, row = trajectory.attributes, trajectory.attributes.get("dataset_row")
    task = given.get("task")
    if is_own(trajectory) and isinstance(row, dict) and isinstance(task, dict):
        named = fitting(task, {"type": str, "key": str, "hash": str})
        return {"type": "Task", **named, "data": fitting(row, _TASK)}
    index = trajectory.sample_index
    is_number = index is not None and index.isdecimal() and len(index) < 19
    data: Fields = {
        "idx": int(index) if index is not None and is_number else None,
        "id": None if is_number else index,
        "answer": given.get("ground_truth"),
        "row": row,
    }
    return {"type": "Task", "data": known(data)}


def fitting(given: dict[str, Any], types: Mapping[str, Any]) -> Fields:
    """Return fields whose values have the types of their names, and those that have no type."""
    found = {}
    for name, value in given.items():
        try:
            msgspec.convert(value, types.get(name, Any))
        except (msgspec.ValidationError, RecursionError):
            continue
        found[name] = value
    return found


def env_of(trajectory: Trajectory) -> Fields:
    """Return the environment."""
    name, source = trajectory.name, trajectory.data_source
    if name is not None and (source is None or name.endswith(source)):
        return {"id": name}
    return known({"id": source, "name": name})


def run_of(trajectory: Trajectory) -> Fields:
    """Return the run, with the step of a training."""
    if trajectory.step is None:
        return {"type": "eval", "id": trajectory.run_id}
    work: Fields = {"type": "eval" if trajectory.validate else "train", "step": trajectory.step}
    versions = trajectory.attributes.get("weight_versions")
    if isinstance(versions, list) and len(versions) == 2 and all(type(v) is int for v in versions):
        start, end = versions
        if start <= end:
            work["policy"] = {"start": start, "end": end}
    return {"type": "train", "id": trajectory.run_id, "work": work}


def agent_of(trajectory: Trajectory) -> Fields:
    """Return the agent."""
    given = trajectory.attributes
    harness = text(given.get("harness"))
    first = next(iter(trajectory.turns), None)
    model = text(given.get("model")) or (None if first is None else model_of(first))
    runtime = given.get("runtime")
    config: Fields = {
        "harness": None if harness is None else {"id": harness},
        "model": model,
        "runtime": {"type": runtime if runtime in _RUNTIMES else "subprocess"},
    }
    name = trajectory.agent or "agent"
    return {
        "config": known(config),
        "name": name,
        "trainable": given.get("trainable") is not False,
    }


def tools_of(graph: MessageGraph) -> list[Fields]:
    """Return the tools of all branches, the newest definition of each name."""
    found = {tool["name"]: tool for node in graph.nodes for tool in node.get("tools", ())}
    return list(found.values())


def scores_of(trajectory: Trajectory) -> tuple[Fields, Fields]:
    """Return rewards and metrics. What is no part of the reward's sum is a metric."""
    given, reward = trajectory.attributes, trajectory.reward
    parts, weights = _numbers(given.get("reward_extra_info")), _numbers(given.get("reward_weights"))
    total = sum(value * weights.get(name, 1.0) for name, value in parts.items())
    metrics = _numbers(given.get("metrics"))
    if reward is None or not math.isfinite(reward):
        return {}, metrics
    if parts and math.isclose(total, reward, rel_tol=1e-9, abs_tol=1e-9):
        return {
            name: {"score": value, "weight": weights.get(name, 1.0)}
            for name, value in parts.items()
        }, metrics
    return {"reward": {"score": reward}}, {**parts, **metrics}


def timing_of(trajectory: Trajectory) -> Fields:
    """Return start and end."""
    start, end = trajectory.start_ns / 1e9, (trajectory.end_ns or trajectory.start_ns) / 1e9
    return {"start": start, "agent": {"start": start, "end": end}}


def failures_of(given: Any) -> list[Fields]:
    """Return errors as verifiers keeps them: type, then message."""
    found = []
    for one in given if isinstance(given, list) else ():
        if isinstance(one, dict):
            found.append({"type": str(one.get("type")), "message": str(one.get("message") or "")})
        elif isinstance(one, str):
            kind, mark, message = one.partition(": ")
            whole = mark and kind.isidentifier()
            found.append(
                {"type": kind, "message": message} if whole else {"type": "Error", "message": one}
            )
    return found


def sampling_of(given: Any) -> Fields | None:
    """Return sampling settings; of verifiers' own names only those of its types."""
    if not isinstance(given, Mapping):
        return None
    kinds = {"temperature": float, "top_p": float, "reasoning_effort": str, "max_tokens": int}
    found = {}
    for name, value in given.items():
        kind = kinds.get("max_tokens" if name == "max_completion_tokens" else str(name))
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is None or isinstance(value, kind) or (kind is float and number):
            found[name] = value
    found.pop("extra_body", None)
    return found or None


def usage_of(span: Span) -> Fields | None:
    """Return counts of tokens; None where they are not known."""
    outputs = span.outputs if isinstance(span.outputs, Mapping) else {}
    usage = outputs.get("usage")
    counts = {
        name: value
        for name, value in (usage.items() if isinstance(usage, Mapping) else ())
        if type(value) is int and value >= 0
    }
    prompt = counts.get("prompt_tokens", None if span.prompt_ids is None else len(span.prompt_ids))
    answer = counts.get("completion_tokens", span.generated_count)
    if prompt is None or answer is None:
        return None
    cached = counts.get("cached_tokens")
    return known({
        "prompt_tokens": prompt - (cached or 0),
        "completion_tokens": answer,
        "cached_input_tokens": cached,
        "reasoning_tokens": counts.get("reasoning_tokens"),
    })  # fmt: skip


def _numbers(given: Any) -> dict[str, float]:
    if not isinstance(given, Mapping):
        return {}
    return {
        name: value
        for name, value in given.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def text(value: Any) -> str | None:
    """Return a text that is not empty, else None."""
    return value if isinstance(value, str) and value else None
