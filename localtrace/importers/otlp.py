"""Traces of OpenTelemetry with generative AI's conventions, `gen_ai.*` or OpenInference's.

    root span                      -> trajectory; its attributes stay attributes
    spans of generations           -> turns with messages, tools and usage
    spans of tools, agents, others -> calls, with parents, errors and links
    gen_ai.evaluation.result       -> outcomes; the one named reward, or the only one, is the reward

A trace id stays the trajectory's. A trace without a single root is one trajectory all the same. A
root that is itself a generation, tool or evaluation is also a call. What localtrace exported keeps
its trace ids, places and rewards, which are attributes `localtrace.*` of its roots.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from localtrace.importers.exported import take_fields
from localtrace.importers.imported_rollouts import (
    CallIn,
    OutcomeIn,
    Rollout,
    SharedPrompts,
    folder_run_id,
)
from localtrace.importers.intake import Report
from localtrace.importers.lines import BadLine
from localtrace.importers.otlp_chat import Attributes, arguments_and_result, parsed
from localtrace.importers.otlp_files import read_spans
from localtrace.importers.otlp_spans import SpanIn
from localtrace.importers.otlp_traces import traces
from localtrace.importers.otlp_tree import Tree, tree_of
from localtrace.importers.source import Source
from localtrace.values.fields import known

PATTERN = "*.json*"
_ID = re.compile(r"[0-9a-f]{32}")
EVALUATION = "gen_ai.evaluation.result"
_KIND_NAMES = ("gen_ai.operation.name", "openinference.span.kind", "mlflow.spanType",
               "traceloop.span.kind", "llm.request.type")  # fmt: skip
_KINDS = {
    "chat": "generation", "text_completion": "generation", "generate_content": "generation",
    "completion": "generation", "llm": "generation", "chat_model": "generation",
    "execute_tool": "tool", "tool": "tool",
    "invoke_agent": "agent", "create_agent": "agent", "agent": "agent", "invoke_workflow": "agent",
    "workflow": "agent", "evaluator": "reward", "chain": "other", "task": "other",
}  # fmt: skip
_CALLS = ("generation", "tool", "reward")
"""Kinds of which a root is a call, too."""
_MESSAGES = ("gen_ai.prompt", "gen_ai.completion", "gen_ai.input.messages", "llm.input_messages")
_NO_REWARD = "rewards: several evaluations may be it, so name one by --reward"


@dataclass(frozen=True, slots=True)
class Names:
    """The attributes that hold a trajectory's reward and place."""

    reward: str | None = None
    """An attribute or an evaluation."""
    step: str | None = None
    sample_index: str | None = None
    rollout_n: str | None = None


default_run_id = partial(folder_run_id, "otlp")


def read_rollouts(source: Source, names: Names) -> Iterator[Rollout]:
    """Yield the trajectory of each trace; what is none is counted in the report."""
    for spans, size_bytes in traces(read_spans(source), source.report):
        found = _read(spans, names, source.report)
        spans.clear()  # a trace may be large, so it is gone while its rollout is written
        if found is not None:
            yield replace(found, size_bytes=size_bytes)
            del found


def _read(spans: list[SpanIn], names: Names, report: Report) -> Rollout | None:
    """Return the trajectory of a trace; None: there is none, which is counted in the report."""
    try:
        tree = tree_of(spans)
        if tree is None:
            report.left_out["events of spans that are not in the files"] += len(spans)
            return None
        return _Trace(tree, names, report).rollout()
    except BadLine as error:
        report.refuse(f"trace {spans[0].trace_id}", str(error))
    except RecursionError:
        report.refuse(f"trace {spans[0].trace_id}", "nested too deeply")
    except Exception as error:
        # Attributes are hostile input: an error costs only its own trace.
        report.refuse(f"trace {spans[0].trace_id}", f"{type(error).__name__}: {error}")
    return None


class _Trace:
    """One trace that other tools wrote."""

    def __init__(self, tree: Tree, names: Names, report: Report) -> None:
        self._tree = tree
        self._names = names
        self._report = report
        self._messages = SharedPrompts()

    def rollout(self) -> Rollout:
        """Return the trajectory.

        Raises:
            BadLine: an attribute that an option names is of another type.
        """
        root, spans = self._tree.root, self._tree.spans
        calls = [one for one in spans if one is not root or _kind(one) in _CALLS]
        seqs = {one.span_id: seq for seq, one in enumerate(calls)}
        start_ns = min(one.start_ns for one in spans)
        outcomes = [outcome for one in spans for outcome in _outcomes(one)]
        values: dict[str, Any] = {}
        place = {name: self._place(name) for name in ("step", "sample_index", "rollout_n")}
        about: dict[str, Any] = {}
        trace_id = spans[0].trace_id
        if root is not None:
            own = Attributes(dict(root.attributes))
            exported = own.take_all("localtrace.")
            if _ID.fullmatch(str(exported.get("trace_id"))):
                trace_id = str(exported["trace_id"])
                values |= known({"reward": exported.get("reward")})
                place = take_fields(exported, but="status")
            about = {
                "name": root.name,
                "agent": _as_text(own.take("gen_ai.agent.name", "agent.name")),
                "status": "ok" if root.error is None else "error",
                "error": root.error or None,
            }
            if root not in calls:
                values |= {name: parsed(value) for name, value in own.left.items()}
            values |= {"links": root.links} if root.links else {}
        if "reward" not in values:
            outcomes += self._rewarded(outcomes, values)
        return Rollout(
            trace_id=trace_id,
            calls=tuple(
                self._call(one, seqs[one.span_id])
                for one in self._tree.inner_first()
                if one.span_id in seqs
            ),
            start_ns=start_ns,
            duration_ns=max(one.end_ns for one in spans) - start_ns,
            values=values,
            is_export=trace_id != spans[0].trace_id,
            outcomes=tuple(replace(one, step=place.get("step")) for one in outcomes),
            **about | place,
        )

    def _place(self, name: str) -> Any:
        attribute = getattr(self._names, name)
        value = None if attribute is None else self._named(attribute)
        if name == "sample_index" and type(value) in (int, str):
            return str(value)
        if isinstance(value, str) and value.isdecimal() and len(value) < 19:
            value = int(value)
        if value is not None and type(value) is not int:
            raise BadLine(f"{attribute} is not a {name}")
        return value

    def _named(self, attribute: str) -> Any:
        """Return the value of an attribute: of the root, its service, then any other span."""
        spans = self._tree.spans
        first = spans if self._tree.root is None else [self._tree.root, *spans]
        for one in first:
            metadata = parsed(one.attributes.get("metadata"))
            fields = metadata if isinstance(metadata, dict) else {}
            for held in (one.attributes, fields, one.resource):
                if (value := held.get(attribute)) is not None:
                    return parsed(value) if str(value).startswith('"') else value  # MLflow's text
        return None

    def _rewarded(self, outcomes: list[OutcomeIn], values: dict[str, Any]) -> list[OutcomeIn]:
        """Set the reward, or return it as an outcome if it is one under another name."""
        wanted = self._names.reward
        scored = {one.name: one for one in outcomes if isinstance(one.value, int | float)}
        if wanted is not None and wanted not in scored:
            value = self._named(wanted)
            if isinstance(value, bool | int | float):
                values["reward"] = float(value)
            elif value is not None:
                raise BadLine(f"{wanted} is not a number")
            return []
        if wanted is None and "reward" not in scored and len(scored) > 1:
            self._report.left_out[_NO_REWARD] += 1
            return []
        chosen = scored.get(wanted or "reward") or next(iter(scored.values()), None)
        if chosen is None or chosen.name == "reward":
            return []
        return [replace(chosen, name="reward")]

    def _call(self, span: SpanIn, seq: int) -> CallIn:
        kind = _kind(span)
        attributes = Attributes(dict(span.attributes))
        if kind == "generation":
            inputs, outputs = arguments_and_result(span, attributes)
        else:
            inputs, outputs = _any_call(span, attributes, kind)
        left = {name: value for name, value in attributes.left.items() if value is not None}
        inputs |= {"attributes": left} if left else {}
        inputs |= {"links": span.links} if span.links else {}
        named = attributes.left.get("gen_ai.tool.name") or attributes.left.get("tool.name")
        return CallIn(
            span_id=int(span.span_id, 16),
            op=str(named) if kind == "tool" and named else span.name or "span",
            start_ns=span.start_ns,
            duration_ns=span.end_ns - span.start_ns,
            inputs=self._messages.shared(inputs),
            outputs=outputs,
            status="ok" if span.error is None else "error",
            error=_error(span),
            parent_id=self._tree.parent_of(span),
            seq=seq,
            takes_prompt=kind == "generation",
            kind=kind,
        )


def _any_call(span: SpanIn, attributes: Attributes, kind: str | None) -> tuple[dict[str, Any], Any]:
    given = attributes.take_json(
        "gen_ai.tool.call.arguments", "mlflow.spanInputs", "traceloop.entity.input", "input.value"
    )
    said = attributes.take_json(
        "gen_ai.tool.call.result", "mlflow.spanOutputs", "traceloop.entity.output", "output.value"
    )
    return given if isinstance(given, dict) else {} if given is None else {"input": given}, said


def _kind(span: SpanIn) -> str | None:
    for name in _KIND_NAMES:
        said = span.attributes.get(name)
        if isinstance(said, str) and (found := _KINDS.get(said.strip('"').lower())) is not None:
            return found
    return "generation" if any(name.startswith(_MESSAGES) for name in span.attributes) else None


def _error(span: SpanIn) -> str | None:
    if span.error is None:
        return None
    for event in span.events:
        if event.name == "exception":
            parts = (event.attributes.get(f"exception.{name}") for name in ("type", "message"))
            return ": ".join(str(one) for one in parts if one) or span.error
    return span.error or _as_text(span.attributes.get("error.type"))


def _outcomes(span: SpanIn) -> Iterator[OutcomeIn]:
    """Yield the evaluations of a span: score, label and explanation, each under a name."""
    for event in span.events:
        if event.name != EVALUATION:
            continue
        name = _as_text(event.attributes.get("gen_ai.evaluation.name")) or "evaluation"
        score, label, why = (
            event.attributes.get(f"gen_ai.evaluation.{part}")
            for part in ("score.value", "score.label", "explanation")
        )
        parts = {"": score, "_label": label, "_explanation": why}
        found = {suffix: one for suffix, one in parts.items() if isinstance(one, int | float | str)}
        for number, (suffix, value) in enumerate(found.items()):
            value = float(value) if isinstance(value, bool | int) else value
            yield OutcomeIn(name + (suffix if number else ""), value, event.time_ns)


def _as_text(value: Any) -> str | None:
    return None if value is None else str(value)
