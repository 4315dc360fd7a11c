"""Trajectories as verifiers' saved episodes: the lines of a `traces.jsonl`.

An episode holds one trace, that of the trajectory. verifiers and prime-rl read such a file with
`verifiers.v1.utils.trace_store.read_episodes(folder, WireTrace)`, where it is `traces.jsonl` in the
folder.

    turns with messages, tools, ids, logprobs  -> message graph and requests to the model
    reward, its parts and their weights        -> rewards
    numbers per token of outcomes              -> advantages, trainer's and reference logprobs
    sample_index, dataset_row, ground_truth    -> task
    step, validate, group_id, run              -> run and group of the episode
    the rest                                   -> `info.localtrace`, named as in `export jsonl`
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from localtrace.exporters.shape import (
    count_no_turn,
    is_finite,
    json_line,
    teaches,
    trajectory_fields,
)
from localtrace.exporters.verifiers_fields import (
    agent_of,
    env_of,
    failures_of,
    fitting,
    is_own,
    run_of,
    sampling_of,
    scores_of,
    task_of,
    text,
    timing_of,
    tools_of,
    usage_of,
)
from localtrace.exporters.verifiers_graph import MessageGraph
from localtrace.read.turns import model_of
from localtrace.trainer_hooks.verifiers.facts import UNKNOWN
from localtrace.trainer_hooks.verifiers.graph import Times, Usage
from localtrace.types import Span, Trajectory
from localtrace.values.fields import Fields, known

TRACE_VERSION = 1
NO_FIELD = (
    "lists of numbers per token under names that verifiers has no field for, kept as "
    "info.localtrace"
)
NOT_FINITE = "lists of numbers per token that are not all finite, kept as info.localtrace"
NO_PLACE = "lists of numbers per token that do not fit the graph, kept as info.localtrace"
NO_REASON = "finish reasons that verifiers does not have"
TOOLS = "calls of tools, with their times and errors: verifiers has messages of tools alone"
_IN_NODES = frozenset({"response_mask", "rollout_log_probs"})
"""Outcomes that the nodes tell, as masks and logprobs of their own."""
_REASONS = {
    "stop": {"stop"},
    "length": {"length", "max_tokens", "max_new_tokens", "max_length"},
    "tool_calls": {"tool_calls", "tool_call", "function_call", "tool_use"},
}
"""verifiers' words, and the reasons of engines that mean the same."""
_TYPED_REASON = re.compile(r'"type"\s*:\s*"([^"]*)"')
_PER_TOKEN = {
    "advantages": "advantages",
    "old_log_probs": "trainer_logprobs",
    "ref_log_prob": "reference_logprobs",
    "entropies": "entropies",
}
"""Fields of nodes, by the outcome whose numbers they hold."""
_OWN: dict[str, Any] = {
    "timing": dict[str, float | Times],
    "info": dict[str, Any],
    "extra_usage": list[Usage],
    "root_reply": str,
    "stop_condition": str,
    "request_rewrites": list[dict[Literal["handler"], str]],
    "response_rewrites": list[dict[Literal["handler"], str]],
}
"""Attributes that are fields of a trace where verifiers wrote them, and the types of these."""
_DERIVED = frozenset(
    {"num_turns", "truncated", "verifiers_version", "task", "dataset_row", "ground_truth",
     "harness", "runtime", "model", "trainable", "episode_id", "episode_errors",
     "reward_extra_info", "reward_weights", "metrics", "is_timeout", "errors", "weight_versions",
     "mm_token_type_id_map", *_OWN}
)  # fmt: skip
"""Attributes that stand elsewhere in an episode that verifiers itself made."""
_PLACED = ("trace_id", "run_id", "step", "validate", "group_id", "agent", "reward", "spans_pruned")
"""Fields of a trajectory that stand elsewhere in every episode."""


class Episodes:
    """The lines of episodes, one trajectory at a time."""

    def __init__(self) -> None:
        self.left_out: Counter[str] = Counter()
        """Counts of what the episodes do not hold, by field."""

    def line(self, trajectory: Trajectory) -> Iterator[bytes]:
        """Yield the line of a trajectory in pieces; none if it has no call of the model."""
        if not teaches(trajectory, self.left_out):
            return
        if not any(span.kind == "generation" for span in trajectory.every_span):
            count_no_turn(trajectory, self.left_out)
            return
        given = trajectory.attributes
        task = task_of(trajectory)
        self._count_calls(trajectory)
        episode: Fields = {
            "id": text(given.get("episode_id")) or trajectory.trace_id,
            "env": env_of(trajectory),
            "task": task,
            "group": None if trajectory.group_id is None else {"id": trajectory.group_id},
            "run": run_of(trajectory),
            "ok": trajectory.status == "ok" and not given.get("episode_errors"),
            "errors": failures_of(given.get("episode_errors")),
            "traces": [self._trace(trajectory, task)],
        }
        yield from json_line(known(episode))

    def _trace(self, trajectory: Trajectory, task: Fields) -> Fields:
        given, own_made = trajectory.attributes, is_own(trajectory)
        graph = MessageGraph(trajectory, self.left_out, is_own=own_made)
        rest = self._set_per_token(trajectory, graph)
        own = fitting({name: given[name] for name in _OWN if own_made and name in given}, _OWN)
        placed = {"localtrace", *(_DERIVED - (_OWN.keys() - own.keys()) if own_made else ())}
        rest["attributes"] = {name: one for name, one in given.items() if name not in placed}
        ended = trajectory.status in ("ok", "error")
        condition = "agent_completed" if trajectory.status == "ok" else "error"
        rewards, metrics = scores_of(trajectory)
        return known({
            "version": TRACE_VERSION,
            "id": trajectory.trace_id,
            "verifiers": {"version": text(given.get("verifiers_version")) or UNKNOWN},
            "task": task,
            "agent": agent_of(trajectory),
            "tools": tools_of(graph),
            "nodes": graph.nodes,
            "calls": [
                self._call(span, graph)
                for span in trajectory.every_span
                if span.kind == "generation" and self._is_request(span, graph)
            ],
            "rewards": rewards,
            "metrics": metrics,
            "timing": timing_of(trajectory),
            **own,
            "info": {**own.get("info", {}), "localtrace": known(rest)},
            "is_completed": ended,
            "ok": trajectory.status == "ok",
            "stop_condition": own.get("stop_condition") or (condition if ended else None),
            "is_timeout": given.get("is_timeout") is True,
            "errors": failures_of(given.get("errors") if own_made else None)
            or failures_of([trajectory.error] if trajectory.error else None),
        })  # fmt: skip

    def _set_per_token(self, trajectory: Trajectory, graph: MessageGraph) -> Fields:
        """Set numbers per token on the nodes; return the fields that have no place of their own."""
        rest = trajectory_fields(trajectory)
        for name in ("attributes", *_PLACED):
            rest.pop(name, None)
        kept = []
        for outcome in rest["outcomes"]:
            name, values = outcome["name"], outcome["value"]
            if isinstance(values, list) and name not in _IN_NODES:
                reason = _place(values, _PER_TOKEN.get(name), graph)
                if reason is None:
                    continue
                self.left_out[reason] += 1
            kept.append(outcome)
        rest["outcomes"] = kept or None
        return rest

    def _is_request(self, span: Span, graph: MessageGraph) -> bool:
        """Return whether a generation is a turn, or a request that failed, and no detail of one."""
        return span.span_id in graph.of_turns or (span.status != "ok" and span.outputs is None)

    def _call(self, span: Span, graph: MessageGraph) -> Fields:
        inputs = span.inputs if isinstance(span.inputs, Mapping) else {}
        reason = _reason_of(span.finish_reason)
        self.left_out[NO_REASON] += reason is None and span.finish_reason is not None
        failures = failures_of([span.error])
        return known({
            "node": graph.of_turns.get(span.span_id),
            "model": model_of(span),
            "sampling": sampling_of(inputs.get("sampling_params")),
            "endpoint": text(inputs.get("endpoint")),
            "finish_reason": reason,
            "usage": usage_of(span),
            "time": {"start": span.start_ns / 1e9, "end": span.end_ns / 1e9},
            "error": failures[0] if failures else None,
        })  # fmt: skip

    def _count_calls(self, trajectory: Trajectory) -> None:
        """Count the calls that an episode does not hold."""
        batches = {span.parent_id for span in trajectory.generations}
        for span in trajectory.every_span:
            if span.kind == "tool":
                self.left_out[TOOLS] += 1
            elif span.kind != "generation" and span.span_id not in batches:
                self.left_out[f"calls of kind {span.kind}"] += 1


def _place(values: list[float], field: str | None, graph: MessageGraph) -> str | None:
    """Set numbers per token on the nodes; return the reason if they have no place there."""
    if field is None:
        return NO_FIELD
    if not all(map(is_finite, values)):
        return NOT_FINITE
    spread = graph.spread(values)
    if spread is None:
        return NO_PLACE
    for node, own in zip(graph.nodes, spread, strict=True):
        if own:
            node[field] = own
    return None


def _reason_of(given: str | None) -> str | None:
    """Return verifiers' word for a finish reason; engines give a text, or an object as JSON."""
    typed = _TYPED_REASON.search(given or "")
    kind = (typed[1] if typed else given or "").lower()
    return next((word for word, kinds in _REASONS.items() if kind in kinds), None)
