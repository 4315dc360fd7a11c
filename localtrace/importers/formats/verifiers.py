"""Episodes that verifiers saved: `traces.jsonl` of its `eval` and of prime-rl.

A line is one episode; each of its agents' traces is a trajectory, as `trainer_hooks.verifiers`
records it, with verifiers' own id. prime-rl has a folder per step:

    rollouts/step_N/train/all        every rollout that ended in the step
    rollouts/step_N/train/effective  those that are trained on in it, with advantages
    rollouts/step_N/eval/…           those of evaluations

A trace is imported once, the effective ones first. verifiers rounds logprobs and advantages to four
decimals in files. What localtrace exported keeps its trace ids, places, rewards and attributes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from localtrace.importers.building import digest_id, outcome, take_exported
from localtrace.importers.source import BadLine, Line, Report, Source
from localtrace.record.capture import verdict
from localtrace.record.config import check_folder_name
from localtrace.record.propagation import trace_id_of
from localtrace.store.journal.records import STATUSES
from localtrace.trainer_hooks.generations import FinishedCall
from localtrace.trainer_hooks.verifiers.facts import (
    end_of,
    interval_of,
    outcomes_of,
    place_of,
    values_of,
)
from localtrace.trainer_hooks.verifiers.graph import Graph
from localtrace.trainer_hooks.verifiers.recording import span_id_of
from localtrace.types import Span, Trajectory
from localtrace.values.codec import from_tagged
from localtrace.values.fields import Fields

PATTERN = "**/traces.jsonl"
SOURCE = "verifiers"
_PLACE = re.compile(r"step_(\d{1,18})/(train|eval)/(all|effective)/[^/]+$")
_OUTCOMES = "outcomes of an export besides those in its messages: bundles carry them"
_SETTINGS = "settings of agents: client, runtime, limits and timeouts"


def default_run_id(files: list[Path]) -> str | None:
    """Return a run id made of that of the first episode; None: it has none.

    It is not the episode's own: a run of that id may have been recorded as it was trained.
    """
    line = next(Source(files, "", Report()).lines(), None)
    try:
        run_id = f"verifiers-{line.fields()['run']['id']}" if line else ""
        check_folder_name(run_id)
    except (BadLine, LookupError, TypeError, ValueError):
        return None
    return run_id


def read(source: Source) -> Iterator[Trajectory]:
    """Import episodes that verifiers or prime-rl saved.

    PATH is a file traces.jsonl, or a folder with such files anywhere below it: that of a run of
    verifiers' eval, or the folder rollouts of prime-rl. Each agent's trace is a trajectory with its
    turns, tools, rewards and errors, and with token ids and logprobs where verifiers had them. Of
    prime-rl, what its effective sets hold is marked as trained, with advantages; import both sets
    at once. Traces keep their ids, so those that the hook recorded are skipped. Without --run the
    run id is verifiers- and that of the first episode, else derived from the folder.
    """
    for line in source.lines(sorted(source.files, key=lambda path: path.parent.name == "all")):
        with source.refusing(line.place):
            yield from _trajectories(line, source)


def _trajectories(line: Line, source: Source) -> list[Trajectory]:
    episode = line.fields()
    traces = episode.pop("traces", None)
    if not isinstance(traces, list) or not all(isinstance(trace, dict) for trace in traces):
        raise BadLine("not an episode of verifiers: it has no list of traces")
    source.report.left_out["episodes without a trace"] += not traces
    return [_trajectory(line, source, episode, n, trace) for n, trace in enumerate(traces)]


def _trajectory(
    line: Line, source: Source, episode: Fields, number: int, trace: Fields
) -> Trajectory:
    graph = Graph()
    graph.add(trace.get("nodes") or [])
    calls = [*graph.turns(trace.get("calls") or []), *graph.rest()]
    own_id = trace.get("id")
    if isinstance(own_id, str) and own_id:
        trace_id = trace_id_of(own_id)
    else:
        place = str(line.path), str(line.number), str(number)
        trace_id = digest_id(16, "verifiers", *place, line.data).hex()
    start_ns, end_ns = interval_of(trace)
    start_ns = start_ns or min([call.start_ns for call in calls], default=0) or line.modified_ns
    match = _PLACE.search(line.path.as_posix())
    place_fields = place_of(trace, episode)._asdict()
    if match and place_fields["step"] is None:
        place_fields["step"] = int(match[1])
    exported = _take_export(trace)
    attributes = values_of(trace, episode, graph)
    if exported:
        place_fields |= take_exported(exported)
        source.report.exports.add(trace_id)
        source.report.left_out[_OUTCOMES] += len(exported.get("outcomes") or ())
        more = from_tagged(exported.get("attributes"))
        attributes |= more if isinstance(more, dict) else {}
    outcomes = outcomes_of(graph)
    if match and match.groups()[1:] == ("train", "effective") and "advantage" in outcomes:
        outcomes |= {"fate": "trained", "trained_step": int(match[1])}
    agent = trace.get("agent")
    source.report.left_out[_SETTINGS] += isinstance(agent, dict) and bool(agent.get("config"))
    code, error = verdict(end_of(trace))
    return Trajectory(
        trace_id=trace_id,
        run_id=source.run_id,
        start_ns=start_ns,
        end_ns=max(start_ns, end_ns),
        reward=attributes.pop("reward", None),
        attributes=attributes,
        spans=[_span(trace_id, seq, call) for seq, call in enumerate(calls)],
        outcomes=[
            outcome(
                trace_id, name, value, line.modified_ns,
                step=place_fields["step"], source=SOURCE,
            )
            for name, value in outcomes.items()
        ],
        **{"status": STATUSES[code], "error": error, **place_fields},
    )  # fmt: skip


def _take_export(trace: Fields) -> Fields:
    """Take what localtrace wrote out of a trace's `info`."""
    info = trace.get("info")
    exported = info.pop("localtrace", None) if isinstance(info, dict) else None
    return exported if isinstance(exported, dict) else {}


def _span(trace_id: str, seq: int, call: FinishedCall) -> Span:
    code, error = verdict(call.error)
    return Span(
        trace_id=trace_id,
        span_id=f"{span_id_of(trace_id, seq):016x}",  # as the hook's
        seq=seq,
        op=call.op,
        status=STATUSES[code],
        error=error,
        start_ns=call.start_ns,
        duration_ns=call.duration_ns,
        inputs=call.inputs,
        outputs=call.outputs,
        is_turn=not call.is_tool,
        kind="tool" if call.is_tool else "generation",
        kind_derived=False,
    )
