"""ATIF, Harbor's format of agents' trajectories, of version 1.0 to 1.8.

A file is one document, as Harbor's `trajectory.json`, or holds one per line, as `localtrace export
atif` writes them. A subagent's document inside another is a trajectory of its own, whose attribute
`parent_trace_id` names the other.

    step of the agent            -> turn: the messages before it, and its ids and logprobs
    system, user, copied context -> messages of the turns after it
    observation                  -> messages of tools; each answer of a named call is a call too
    extra.reward, step, group_id -> the fields of these names
    other extras, notes, ids, …  -> attributes

In a job of Harbor's, place, reward and error come from the trial's result (see `harbor_trials`).

A document that localtrace wrote gives its trajectory back: trace id, calls, outcomes and times.
What is left out is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from localtrace.importers.atif_calls import Calls, whole_ns
from localtrace.importers.atif_document import Document, read_document, unknown_fields
from localtrace.importers.harbor_trials import trial_of
from localtrace.importers.imported_rollouts import OutcomeIn, Rollout, digest_id, folder_run_id
from localtrace.importers.intake import Report
from localtrace.importers.lines import LINE_MAX_BYTES, BadLine, Line, find_files, read_lines
from localtrace.record.config import check_folder_name
from localtrace.store.journal.records import STATUSES
from localtrace.values.tagged_json import from_tagged

PATTERN = "**/trajectory*.json*"
_DEPTH_MAX = 20
"""Documents of subagents inside each other."""
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_ENDED = STATUSES[:-1]
_FIELDS = {
    "step": int, "sample_index": str, "rollout_n": int, "group_id": str, "validate": bool,
    "name": str, "data_source": str, "status": str, "error": str,
}  # fmt: skip
"""Fields of a trajectory that may stand in the extra of its document."""
_ELSEWHERE = ("trace_id", "run_id", "attempt", "project", "experiment", "start_ns", "end_ns",
              "spans_pruned")  # fmt: skip
"""Fields of an exported trajectory that are no attributes of the imported one."""
_NOTED = ("session_id", "trajectory_id", "notes", "final_metrics", "continued_trajectory_ref")
_OTHER_RUN = "run ids: all trajectories get that of the first document, or of --run"
_OTHER_PLACE = "projects, experiments and attempts: --project and --experiment give new ones"


def default_run_id(paths: Iterable[Path]) -> str:
    """Return the run id of the first document, if localtrace wrote it, else one for its folder."""
    first = next(_documents(find_files(paths, PATTERN)[0], lambda _: None), None)
    try:
        document = None if first is None else read_document(first.fields())
    except (BadLine, RecursionError):
        document = None
    run_id = (document.extra or {}).get("run_id") if document and _is_own(document) else None
    try:
        check_folder_name(run_id or "")
    except (TypeError, ValueError, AttributeError):
        run_id = None
    return run_id or folder_run_id("atif", paths)


def read_rollouts(
    paths: Iterable[Path], run_id: str, *, report: Report, on_bytes: Callable[[int], None]
) -> Iterator[Rollout]:
    """Yield the trajectory of each document; what is none is counted in the report.

    A trace id is the document's own where localtrace wrote it, else derived from the run and the
    document, and from its place where it names no session.
    """
    for path in paths:
        for line in _documents(path, on_bytes):
            try:
                found = list(_Reader(line, run_id, report).rollouts(line.fields(), ()))
            except BadLine as error:
                report.refuse(line.place, str(error))
            except RecursionError:
                report.refuse(line.place, "nested too deeply")
            else:
                yield from found


def _documents(path: Path, on_bytes: Callable[[int], None]) -> Iterator[Line]:
    """Yield the lines of a file; a file that begins with a part of a document is one line."""
    lines = read_lines([path], on_bytes)
    first = next(lines, None)
    if first is None:
        return
    if path.suffix == ".jsonl" or first.is_too_long or first.is_object():
        yield first
        yield from lines
        return
    with path.open("rb") as file:
        data = file.read(LINE_MAX_BYTES + 1)
    yield Line(path, 1, data, first.modified_ns, len(data) > LINE_MAX_BYTES)


def _is_own(document: Document) -> bool:
    """Return whether `localtrace export atif` wrote a document."""
    own_id = (document.extra or {}).get("trace_id")
    is_id = isinstance(own_id, str) and _TRACE_ID.fullmatch(own_id) is not None
    return is_id and own_id == document.trajectory_id and "outcomes" in (document.extra or {})


class _Reader:
    """The trajectories of one line: those of its document and of the subagents in it."""

    def __init__(self, line: Line, run_id: str, report: Report) -> None:
        self._line = line
        self._run_id = run_id
        self._report = report
        self._left_out = report.left_out

    def rollouts(self, fields: dict[str, Any], within: tuple[str, ...]) -> Iterator[Rollout]:
        """Yield the trajectory of a document, and those of its subagents.

        Args:
            within: the trace ids of the documents around it, and its place among its siblings.
        """
        document = read_document(fields)
        self._left_out.update(
            f"fields of {part} that ATIF 1.8 does not have" for part in unknown_fields(fields)
        )
        is_own = _is_own(document)
        extra = from_tagged(document.extra or {}) if is_own else dict(document.extra or {})
        trace_id = str(extra["trace_id"]) if is_own else self._trace_id(document, within)
        calls = Calls(document, trace_id, self._line.modified_ns, self._left_out, is_own=is_own)
        start_ns = whole_ns(extra.get("start_ns")) if is_own else None
        if start_ns is None:
            start_ns = min((one.start_ns for one in calls.made), default=self._line.modified_ns)
        end_ns = whole_ns(extra.get("end_ns")) if is_own else None
        if end_ns is None:
            end_ns = max((one.start_ns + one.duration_ns for one in calls.made), default=start_ns)
        if is_own:
            self._count_places(extra)
        place, verdict = ({}, {}) if is_own or within else self._trial()
        fields_of_row = place | _fields_of_row(extra)
        outcomes = tuple(_outcomes(extra.pop("outcomes", None))) if is_own else ()
        if any(one.name == "reward" for one in outcomes):
            extra.pop("reward", None)
        values = {} if is_own else _noted(document)
        values |= {"parent_trace_id": within[-2]} if within else {}
        values |= verdict | _attributes(extra)
        yield Rollout(
            trace_id=trace_id,
            calls=tuple(calls.made),
            start_ns=start_ns,
            duration_ns=max(0, end_ns - start_ns),
            agent=None if is_own and document.agent.name == "unknown" else document.agent.name,
            size_bytes=0 if within else len(self._line.data),
            values=values,
            outcomes=outcomes,
            **fields_of_row,
        )
        if len(within) >= 2 * _DEPTH_MAX:
            raise BadLine("subagents nested too deeply")
        for number, part in enumerate(document.subagent_trajectories or ()):
            yield from self.rollouts(part, (*within, trace_id, str(number)))

    def _trial(self) -> tuple[dict[str, Any], dict[str, Any]]:
        try:
            return trial_of(self._line.path)
        except BadLine as error:
            self._report.refuse(self._line.place, str(error))
            return {}, {}

    def _trace_id(self, document: Document, within: tuple[str, ...]) -> str:
        place = within
        if not within and document.session_id is None and document.trajectory_id is None:
            # Two rollouts may be equal, so a document that is named by nothing is told by its file.
            place = (*self._line.path.parts[-4:], str(self._line.number))
        return digest_id(16, "trace", self._run_id, *place, self._line.data).hex()

    def _count_places(self, extra: dict[str, Any]) -> None:
        self._left_out[_OTHER_RUN] += extra.get("run_id", self._run_id) != self._run_id
        place = tuple(extra.get(name) for name in ("project", "experiment", "attempt"))
        self._left_out[_OTHER_PLACE] += place != ("default", "default", 0)


def _fields_of_row(extra: dict[str, Any]) -> dict[str, Any]:
    """Take the fields of a trajectory out of the extra of its document."""
    placed = {
        name: extra.pop(name) for name, kind in _FIELDS.items() if type(extra.get(name)) is kind
    }
    if placed.get("status") not in _ENDED:
        placed.pop("status", None)
    return placed


def _outcomes(found: Any) -> Iterator[OutcomeIn]:
    for one in found if isinstance(found, list) else ():
        if isinstance(one, dict) and isinstance(one.get("name"), str):
            step, source = one.get("step"), one.get("source")
            yield OutcomeIn(
                one["name"],
                one.get("value"),
                whole_ns(one.get("time_ns")) or 0,
                step if type(step) is int else None,
                source if isinstance(source, str) else None,
            )


def _noted(document: Document) -> dict[str, Any]:
    """Return what a document says about itself, as attributes."""
    noted = {name: getattr(document, name) for name in _NOTED}
    agent = {"agent_version": document.agent.version, "agent_extra": document.agent.extra}
    return {name: one for name, one in {**noted, **agent}.items() if one not in (None, "unknown")}


def _attributes(extra: dict[str, Any]) -> dict[str, Any]:
    """Return what the extra of a document holds besides the fields of its trajectory."""
    values = {name: one for name, one in extra.items() if name not in _ELSEWHERE}
    if isinstance(attributes := values.pop("attributes", None), dict):
        values = {**attributes, **values}
    return {name: one for name, one in values.items() if one is not None}
