"""Episodes that verifiers saved: `traces.jsonl` of its `eval` and of prime-rl.

A line is one episode; each of its agents' traces is a trajectory, as `trainer_hooks.verifiers`
records it, with verifiers' own id. prime-rl has a folder per step:

    rollouts/step_N/train/all        every rollout that ended in the step
    rollouts/step_N/train/effective  those that are trained on in it, with advantages
    rollouts/step_N/eval/…           those of evaluations

A trace is imported once, the effective ones first. verifiers rounds logprobs and advantages to four
decimals in files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from localtrace.importers.exported import outcomes_of as exported_outcomes
from localtrace.importers.imported_rollouts import (
    CallIn,
    OutcomeIn,
    Rollout,
    digest_id,
    folder_run_id,
)
from localtrace.importers.intake import Report
from localtrace.importers.lines import BadLine, Line, find_files, read_lines
from localtrace.importers.source import Source
from localtrace.record.config import check_folder_name
from localtrace.record.propagation import trace_id_of
from localtrace.trainer_hooks.verifiers.facts import (
    end_of,
    interval_of,
    outcomes_of,
    place_of,
    values_of,
)
from localtrace.trainer_hooks.verifiers.graph import Graph, GraphCall
from localtrace.trainer_hooks.verifiers.recording import OP, span_id_of
from localtrace.values.codec import from_tagged
from localtrace.values.fields import Fields

PATTERN = "**/traces.jsonl"
SOURCE = "verifiers"
_PLACE = re.compile(r"step_(\d{1,18})/(train|eval)/(all|effective)/[^/]+$")
_OTHER_RUNS = "other run ids: all trajectories get one"
_SETTINGS = "settings of agents: of their client, runtime, limits and timeouts"
_EPISODE = frozenset({"id", "env", "task", "group", "run", "ok", "is_timeout", "errors", "traces"})
_TRACE = frozenset(
    {"version", "id", "verifiers", "task", "agent", "tools", "nodes", "calls", "rewards", "metrics",
     "info", "root_reply", "extra_usage", "is_completed", "ok", "stop_condition", "is_timeout",
     "errors", "timing", "mm_token_type_id_map", "request_rewrites", "response_rewrites"}
)  # fmt: skip
_NODE = frozenset(
    {"parent", "tools", "message", "sampled", "timestamp", "token_ids", "mask", "logprobs",
     "advantages", "reference_logprobs", "trainer_logprobs", "entropies"}
)  # fmt: skip
_CALL = frozenset(
    {"node", "model", "sampling", "endpoint", "finish_reason", "usage", "time", "error"}
)
_COUNTED = frozenset({"num_input_tokens", "num_output_tokens", "num_total_tokens"})
"""Fields that verifiers derives from others."""


def default_run_id(paths: Iterable[Path]) -> str:
    """Return a run id made of that of the first episode, if it has one, else of its folder.

    It is not the episode's own: a run of that id may have been recorded as it was trained.
    """
    paths = list(paths)
    line = next(read_lines(find_files(paths, PATTERN)[:1], lambda _: None), None)
    try:
        run = {} if line is None else line.fields().get("run")
        run_id = run.get("id") if isinstance(run, Mapping) else None
        if isinstance(run_id, str):
            check_folder_name(f"verifiers-{run_id}")
            return f"verifiers-{run_id}"
    except (BadLine, ValueError):
        pass
    return folder_run_id("verifiers", paths)


def read_rollouts(source: Source) -> Iterator[Rollout]:
    """Yield the trajectory of each trace, those that were trained on first: each comes once."""
    files = sorted(source.files, key=lambda path: path.parent.name == "all")
    return of_lines(read_lines(files, source.on_bytes), source.report)


def of_lines(lines: Iterable[Line], report: Report) -> Iterator[Rollout]:
    """Yield the trajectory of each trace; lines that are no episodes are counted in the report."""
    runs: set[str] = set()
    for line in lines:
        try:
            episode = line.fields()
            traces = _traces(episode)
            found = [_Reader(line, episode, report).rollout(*one) for one in enumerate(traces)]
        except (BadLine, msgspec.ValidationError, ValueError, TypeError, AttributeError) as error:
            report.refuse(line.place, f"not an episode of verifiers: {error}")
        except (RecursionError, OverflowError):
            report.refuse(line.place, "not an episode of verifiers")
        else:
            run = episode.get("run")
            runs.add(str(run.get("id")) if isinstance(run, Mapping) else "")
            if not traces:
                report.left_out["episodes without a trace"] += 1
            yield from found
    report.left_out[_OTHER_RUNS] += max(0, len(runs) - 1)


def _traces(episode: Mapping[str, Any]) -> list[dict[str, Any]]:
    traces = episode.get("traces")
    if not isinstance(traces, list) or not all(isinstance(one, dict) for one in traces):
        raise BadLine("it has no list of traces")
    return traces


class _Reader:
    """One episode, trace by trace."""

    def __init__(self, line: Line, episode: dict[str, Any], report: Report) -> None:
        self._line = line
        self._episode = {name: value for name, value in episode.items() if name != "traces"}
        self._report = report
        found = _PLACE.search(line.path.as_posix())
        self._step = int(found[1]) if found else None
        self._is_trained = found is not None and found[2] == "train" and found[3] == "effective"

    def rollout(self, number: int, trace: dict[str, Any]) -> Rollout:
        """Return the trajectory of a trace.

        Raises:
            msgspec.ValidationError: fields of it have other types than verifiers'.
            ValueError: its message graph is none.
        """
        nodes, calls = trace.get("nodes") or [], trace.get("calls") or []
        graph = Graph()
        graph.add(nodes)
        turns = [*graph.turns(calls), *graph.rest()]
        given_id = trace.get("id")
        if isinstance(given_id, str) and given_id:
            trace_id = trace_id_of(given_id)
        else:
            place = str(self._line.path), str(self._line.number), str(number)
            trace_id = digest_id(16, "verifiers", *place, self._line.data).hex()
        start_ns, end_ns = interval_of(trace)
        start_ns = start_ns or min([one.start_ns for one in turns], default=0)
        start_ns = start_ns or self._line.modified_ns
        failure, place_ = end_of(trace), place_of(trace, self._episode)
        exported = _exported(trace)
        rollout_n, attributes = exported.get("rollout_n"), from_tagged(exported.get("attributes"))
        told = list(exported_outcomes(exported.get("outcomes")))
        self._count(trace, nodes, calls)
        return Rollout(
            trace_id=trace_id,
            calls=tuple(_call(trace_id, seq, one) for seq, one in enumerate(turns)),
            start_ns=start_ns,
            duration_ns=max(0, end_ns - start_ns),
            step=self._step if place_.step is None else place_.step,
            sample_index=place_.sample_index,
            rollout_n=rollout_n if type(rollout_n) is int else None,
            group_id=place_.group_id,
            validate=place_.validate,
            name=place_.name,
            agent=place_.agent,
            data_source=place_.data_source,
            status="ok" if failure is None else failure.status,
            error=None if failure is None else failure.text,
            values=values_of(trace, self._episode, graph)
            | (attributes if isinstance(attributes, dict) else {}),
            outcomes=self._outcomes(outcomes_of(graph), told),
            size_bytes=len(self._line.data) if number == 0 else 0,
        )

    def _outcomes(self, found: Fields, exported: list[OutcomeIn]) -> tuple[OutcomeIn, ...]:
        if self._is_trained and "advantage" in found:
            found |= {"fate": "trained", "trained_step": self._step}
        at_ns = self._line.modified_ns
        own = {one.name for one in exported}
        return (
            *(
                OutcomeIn(name, value, at_ns, self._step, SOURCE)
                for name, value in found.items()
                if name not in own
            ),
            *exported,
        )

    def _count(self, trace: dict[str, Any], nodes: list[Any], calls: list[Any]) -> None:
        """Count the fields that a trajectory does not hold."""
        self._count_fields("episodes", [self._episode], _EPISODE)
        self._count_fields("traces", [trace], _TRACE)
        self._count_fields("messages", nodes, _NODE)
        self._count_fields("requests", calls, _CALL)
        errors = [*(trace.get("errors") or []), *filter(None, (one.get("error") for one in calls))]
        self._count_fields("errors", errors, frozenset({"type", "message"}))
        scores = [*(trace.get("rewards") or {}).values(), *(trace.get("metrics") or {}).values()]
        self._report.left_out["rewards and metrics without a value"] += scores.count(None)
        agent = trace.get("agent")
        self._report.left_out[_SETTINGS] += isinstance(agent, dict) and bool(agent.get("config"))

    def _count_fields(self, what: str, found: list[Any], known: frozenset[str]) -> None:
        for one in found:
            for name in one.keys() - known - _COUNTED:
                if one[name] not in (None, [], {}):
                    self._report.left_out[f"{str(name)[:80]} of {what}"] += 1


def _exported(trace: dict[str, Any]) -> Fields:
    """Take what localtrace wrote out of a trace's `info`."""
    info = trace.get("info")
    found = info.pop("localtrace", None) if isinstance(info, dict) else None
    return found if isinstance(found, dict) else {}


def _call(trace_id: str, seq: int, one: GraphCall) -> CallIn:
    is_tool = one.tool is not None
    failure = one.error
    return CallIn(
        span_id_of(trace_id, seq), OP if one.tool is None else one.tool,
        one.start_ns, one.duration_ns, one.inputs, one.outputs, seq=seq,
        takes_prompt=not is_tool, kind="tool" if is_tool else "generation",
        status="ok" if failure is None else failure.status,
        error=None if failure is None else failure.text,
    )  # fmt: skip
