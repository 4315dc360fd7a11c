"""Traces that localtrace itself exported: everything that they hold comes back as it was."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from localtrace.importers.imported_rollouts import CallIn, OutcomeIn, Rollout, SharedPrompts
from localtrace.importers.intake import Report
from localtrace.importers.lines import BadLine
from localtrace.importers.otlp_spans import SpanIn
from localtrace.importers.otlp_tree import Tree
from localtrace.store.journal.records import STATUSES
from localtrace.values.codec import fields_from_json, from_json

_PREFIX = "localtrace."
_NO_NAME = "agent_loop"
"""The name of the root of a trajectory without a name, which is that of verl's live tracing."""
_OUTCOMES = ("advantage", "fate", "trained_step")
_LABELS = ("tag", "rating", "comment")
_EVALUATION = "gen_ai.evaluation.result"
_ID = re.compile(r"[0-9a-f]{32}")
_SPAN_ID = re.compile(r"[0-9a-f]{16}")
_KINDS = {"LLM": "generation", "TOOL": "tool", "AGENT": "agent", "EVALUATOR": "reward"}
_FIELDS = {
    "step": int, "sample_index": str, "rollout_n": int, "group_id": str, "validate": bool,
    "data_source": str,
}  # fmt: skip


def is_own(root: SpanIn) -> bool:
    """Tell whether localtrace wrote the root of a trace."""
    return _ID.fullmatch(str(root.attributes.get("localtrace.trace_id"))) is not None


def rollout(root: SpanIn, tree: Tree, report: Report) -> Rollout:
    """Return the trajectory.

    Raises:
        BadLine: an attribute is not of its type.
    """
    own = {
        name.removeprefix(_PREFIX): value
        for name, value in root.attributes.items()
        if name.startswith(_PREFIX)
    }
    fields: dict[str, Any] = {name: own.get(name) for name in _FIELDS}
    for name, value in fields.items():
        if value is not None and type(value) is not _FIELDS[name]:
            raise BadLine(f"localtrace.{name} is not {_FIELDS[name].__name__}")
    calls = [one for one in tree.spans if one is not root]
    ids = {one.span_id: _span_id(one) for one in calls}
    messages = SharedPrompts()
    seqs = {one.span_id: place for place, one in enumerate(calls)}
    report.left_out["names of runs: give them by --run, --project and --experiment"] += 1
    status = own.get("status")
    values = fields_from_json(root.attributes.get("metadata"))
    if own.get("reward") is not None:
        values["reward"] = _number(own["reward"])
    return Rollout(
        trace_id=str(own["trace_id"]),
        calls=tuple(
            _call(
                one,
                ids[one.span_id],
                ids.get(tree.callers.get(one.span_id, "")),
                seqs[one.span_id],
                messages,
            )
            for one in tree.inner_first()
            if one is not root
        ),
        start_ns=root.start_ns,
        duration_ns=root.end_ns - root.start_ns,
        name=None if root.name == _NO_NAME else root.name,
        agent=root.attributes.get("gen_ai.agent.name"),
        status=status if status in STATUSES[:-1] else "ok",
        error=None if root.error in (None, status) else root.error,
        values=values,
        outcomes=tuple(_outcomes(root, own)),
        **{**fields, "validate": fields["validate"] is True},
    )


def _span_id(span: SpanIn) -> int:
    own = str(span.attributes.get("localtrace.span_id"))
    return int(own if _SPAN_ID.fullmatch(own) else span.span_id, 16)


def _call(
    span: SpanIn, span_id: int, parent_id: int | None, place: int, messages: SharedPrompts
) -> CallIn:
    held = span.attributes
    kind = _KINDS.get(str(held.get("openinference.span.kind")), "other")
    status = held.get("localtrace.status")
    if status not in STATUSES[:3]:
        status = "ok" if span.error is None else "error"
    given, said = (held.get(f"{name}.value") for name in ("input", "output"))
    inputs = from_json(given) if isinstance(given, str) else {}
    seq = held.get("localtrace.seq")
    return CallIn(
        span_id=span_id,
        op=span.name or "",
        start_ns=span.start_ns,
        duration_ns=span.end_ns - span.start_ns,
        inputs=messages.shared(inputs if isinstance(inputs, dict) else {"inputs": inputs}),
        outputs=from_json(said) if isinstance(said, str) else None,
        status=status,
        error=None if span.error in (None, status) else span.error,
        parent_id=parent_id,
        seq=seq if type(seq) is int else place,
        is_detail=kind != "generation" and not held.get("localtrace.generations"),
        kind=None if held.get("localtrace.kind_derived") is True else kind,
    )


def _outcomes(root: SpanIn, own: dict[str, Any]) -> Iterator[OutcomeIn]:
    """Yield the outcomes; labels, of which each person may give one, are events."""
    listed = {name: own[name] for name in _OUTCOMES if name in own}
    listed |= {
        name.removeprefix("outcome."): value
        for name, value in own.items()
        if name.startswith("outcome.")
    }
    labels = [one for one in root.events if one.name == _EVALUATION]
    names = {one.attributes.get("gen_ai.evaluation.name") for one in labels}
    given = fields_from_json(own.get("outcomes"))
    for name, value in listed.items():
        if name not in names or name not in _LABELS:
            told = given.get(name)
            time_ns, step, source = told if isinstance(told, list) and len(told) == 3 else (
                root.end_ns, own.get("step"), None)  # fmt: skip
            yield OutcomeIn(name, _value(value), time_ns, step, source)
    for event in labels:
        label = event.attributes.get("gen_ai.evaluation.name")
        if label in _LABELS:
            parts = ("score.value", "score.label", "explanation")
            said = (event.attributes.get(f"gen_ai.evaluation.{part}") for part in parts)
            value = next((one for one in said if one is not None), None)
            source = event.attributes.get("localtrace.source")
            yield OutcomeIn(label, value, event.time_ns, own.get("step"), source)


def _value(value: Any) -> Any:
    """Return a number, text, or list of numbers, which are exported as JSON."""
    if isinstance(value, str) and value.startswith(("[", '{"$type"')):
        found = from_json(value)
        if isinstance(found, float) or (
            isinstance(found, list) and all(type(one) in (int, float) for one in found)
        ):
            return found
    return value


def _number(value: Any) -> float:
    found = _value(value)
    if type(found) not in (int, float):
        raise BadLine("localtrace.reward is not a number")
    return float(found) if math.isfinite(found) else found
