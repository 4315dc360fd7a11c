"""One rollout: a conversation to read, its calls on a timeline, its outcomes, and single calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from localtrace.errors import NotFound
from localtrace.field_names import LABEL_NAMES
from localtrace.read.excerpts import reference_of
from localtrace.read.turns import with_depth
from localtrace.read.unseen import why_no_calls, why_unfinished
from localtrace.types import Outcome, Trajectory
from localtrace.viewer.addresses import group_url, part, prompt_url, step_filters, url
from localtrace.viewer.conversation_parts import conversation_facts
from localtrace.viewer.labelling import why_read_only
from localtrace.viewer.listing import Listing
from localtrace.viewer.page import Facts, Page, copies, neighbours, upload_command
from localtrace.viewer.page_request import PageRequest

_CALLS = 60
_CALLS_MAX = 300
_TEXT_MAX = 200_000
"""The characters of a text that the page of a call holds."""
_ROW_SQL = """
select run_id, step, validate, sample_index, group_key, prompt_hash, turn_count, output_tokens,
    superseded, advantage, fate, fate_reason
from all_trajectories where trace_id = $trace
"""
_UPLOADS_SQL = """
select kind, target, container, run, remote_id, state, verified,
    uploaded_at::varchar as uploaded_at, reason
from uploads where trace_id = $trace order by uploaded_at
"""


def trajectory_of(request: PageRequest) -> Trajectory:
    """Return the trajectory of the address.

    Raises:
        NotFound: there is none of this id.
    """
    trace_id = request.path_values["trace_id"]
    return request.kept(("trajectory", trace_id), lambda: request.store.trajectory(trace_id))


def read(request: PageRequest) -> Facts:
    """Return what is known of the trajectory, and a part of its conversation."""
    trajectory, head = trajectory_of(request), read_head(request)
    trace_id, row = trajectory.trace_id, head["row"]
    path = f"/trajectory/{part(trace_id)}"
    return {
        **head,
        "title": f"Rollout {trace_id[:8]}",
        "reference": reference_of(trajectory.attributes),
        "attributes": trajectory.attributes,
        "outcomes": outcomes_of(
            outcome for outcome in trajectory.outcomes if outcome.name not in LABEL_NAMES
        ),
        "labels": outcomes_of(trajectory.labels),
        "why_read_only": why_read_only(request.store),
        "uploads": request.rows(_UPLOADS_SQL, {"trace": trace_id}),
        "why_no_calls": why_no_calls(trajectory),
        **conversation_facts(request, trajectory),
        "calls": _calls(trajectory)[:_CALLS],
        "calls_url": f"{path}/calls",
        "tokens_url": url(f"{path}/tokens", q=request.q, sort=request.values.get("sort")),
        "has_ids": any(turn.output_ids for turn in trajectory.turns),
        "step_url": url("/groups", q=step_filters(row["run_id"], row["step"], row["validate"])),
        "group_url": group_url(row),
        "prompt_url": prompt_url(row),
        "raw_url": f"{path}.json",
        **list_neighbours(request, trace_id),
        "copies": copies(
            request,
            "select * from spans where trace_id = $trace and step is not distinct from $step "
            "order by seq",
            {"trace": trace_id, "step": trajectory.step},
            f"show {trace_id}",
            f"trajectory = store.trajectory({trace_id!r})\ntrajectory.spans",
        ),
        "upload": upload_command(request, f"\"where=trace_id = '{trace_id}'\""),
    }


def read_head(request: PageRequest) -> Facts:
    """Return what its page begins with, which changes whenever a call returns."""
    trajectory = trajectory_of(request)
    (row,) = request.rows(_ROW_SQL, {"trace": trajectory.trace_id})
    return {
        "trace_id": trajectory.trace_id,
        "trajectory": head_of(trajectory),
        "row": row | (trajectory.counts if trajectory.end_ns is None else {}),
        "calls_total": len(trajectory.every_span),
    }


def read_calls(request: PageRequest) -> Facts:
    """Return some rows of the calls."""
    start = request.number("from", 0)
    end = min(request.number("to", start + _CALLS), start + _CALLS_MAX)
    calls = _calls(trajectory_of(request))
    return {"calls": calls[start:end], "start": start, "total": len(calls)}


def read_call(request: PageRequest) -> Facts:
    """Return one call whole: its arguments, its result, and its texts."""
    trajectory = trajectory_of(request)
    span_id = request.path_values["span_id"]
    span = next((span for span in trajectory.every_span if span.span_id == span_id), None)
    if span is None:
        raise NotFound(f"the rollout has no call {span_id}: its page lists them")
    start = request.number("at", 0)
    text = span.output_text
    path = f"/trajectory/{part(trajectory.trace_id)}"
    return {
        "title": span.op,
        "trace_id": trajectory.trace_id,
        "trajectory_url": path,
        "call": {
            name: getattr(span, name)
            for name in ("span_id", "parent_id", "seq", "op", "kind", "kind_derived", "status",
                         "error", "traceback", "start_ns", "duration_ns", "is_turn",
                         "finish_reason")
        },
        "inputs": span.inputs,
        "outputs": span.outputs,
        "text": None if text is None else text[start : start + _TEXT_MAX],
        "text_start": start,
        "text_length": None if text is None else len(text),
        "next_url": url(f"{path}/call/{part(span_id)}", at=start + _TEXT_MAX)
        if text is not None and start + _TEXT_MAX < len(text)
        else None,
        "output_message": span.output_message,
        "output_ids": span.output_ids,
        "prompt_ids": span.prompt_ids,
        "messages": span.messages,
        "copies": copies(
            request,
            "select * from spans where trace_id = $trace and span_id = $span",
            {"trace": trajectory.trace_id, "span": span_id},
            f"show {trajectory.trace_id}",
            f"trajectory = store.trajectory({trajectory.trace_id!r})\n"
            f"next(span for span in trajectory.every_span if span.span_id == {span_id!r})",
        ),
    }  # fmt: skip


def list_neighbours(request: PageRequest, trace_id: str, below: str = "") -> Facts:
    """Return the rollouts before and after in the list that the address names.

    Args:
        request: the request.
        trace_id: the rollout in the middle.
        below: the end of their addresses.
    """
    if "q" not in request.values and "sort" not in request.values:
        return neighbours(None, 0, lambda at: None)
    every = Listing(request)
    kept = {"sort": request.values.get("sort") or "-step", "find": request.values.get("find")}

    def address(at: int) -> str:
        (neighbour,) = every.slice(at, at + 1)
        return url(f"/trajectory/{part(neighbour)}{below}", q=request.q, **kept)

    return neighbours(every.index(trace_id), len(every), address)


def _calls(trajectory: Trajectory) -> list[dict[str, Any]]:
    path = f"/trajectory/{part(trajectory.trace_id)}/call"
    return [row | {"url": f"{path}/{part(row['span_id'])}"} for row in call_rows(trajectory)]


def call_rows(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the calls of a trajectory as rows of a timeline."""
    spans = trajectory.every_span
    begin = min((span.start_ns for span in spans), default=0)
    length = max((span.end_ns for span in spans), default=0) - begin or 1
    names = ("span_id", "op", "kind", "kind_derived", "status", "duration_ns")
    return [
        {name: getattr(span, name) for name in names}
        | {
            "depth": min(depth, 12),
            "start_share": (span.start_ns - begin) / length,
            "share": span.duration_ns / length,
            "tokens": None if span.output_ids is None else len(span.output_ids),
            "url": None,
        }
        for depth, span in with_depth(spans)
    ]


def head_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields of a trajectory that its page begins with."""
    names = ("run_id", "attempt", "project", "experiment", "step", "sample_index", "rollout_n",
             "group_id", "validate", "name", "agent", "data_source", "status", "error",
             "traceback", "start_ns", "end_ns", "reward")  # fmt: skip
    head = {name: getattr(trajectory, name) for name in names}
    return head | {"why_unfinished": why_unfinished(trajectory)}


def outcomes_of(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Return the facts of outcomes; of values per token their number."""
    return [
        {"name": outcome.name, "number": outcome.number, "text": outcome.text,
         "source": outcome.source, "time_ns": outcome.time_ns,
         "values": None if outcome.values is None else len(outcome.values)}
        for outcome in outcomes
    ]  # fmt: skip


PAGE = Page("/trajectory/{trace_id}", "trajectory.html", read)
HEAD = Page("/trajectory/{trace_id}/head", "head.html", read_head)
CALLS = Page("/trajectory/{trace_id}/calls", "calls.html", read_calls)
CALL = Page("/trajectory/{trace_id}/call/{span_id}", "call.html", read_call)
