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

A document that localtrace wrote keeps its trace id, so that a store which has it adds nothing. A
bundle carries trajectories exactly. What is left out is counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from localtrace.importers.atif_calls import Calls
from localtrace.importers.atif_document import Document, read_document, unknown_fields
from localtrace.importers.exported import take_fields
from localtrace.importers.harbor_trials import trial_of
from localtrace.importers.imported_rollouts import Rollout, digest_id, folder_run_id
from localtrace.importers.lines import BadLine, Line, read_documents
from localtrace.importers.source import Source

PATTERN = "**/trajectory*.json*"
_DEPTH_MAX = 20
"""Documents of subagents inside each other."""
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_ELSEWHERE = ("trace_id", "run_id", "attempt", "project", "experiment", "start_ns", "end_ns",
              "spans_pruned")  # fmt: skip
"""Fields of an exported trajectory that are no attributes of the imported one."""
_OUTCOMES = "outcomes: the format has no field for them, and bundles carry them"
_NOTED = ("session_id", "trajectory_id", "notes", "final_metrics", "continued_trajectory_ref")


def default_run_id(paths: Iterable[Path]) -> str:
    """Return the run id for the folder of the first file."""
    return folder_run_id("atif", paths)


def read_rollouts(source: Source) -> Iterator[Rollout]:
    """Yield the trajectory of each document; what is none is counted in the report.

    A trace id is the document's own where localtrace wrote it, otherwise derived from the run and
    the document, and from its place where it names no session.
    """
    for path in source.files:
        for line in read_documents(path, source.on_bytes):
            try:
                found = list(_Reader(line, source).rollouts(line.fields(), ()))
            except BadLine as error:
                source.report.refuse(line.place, str(error))
            except RecursionError:
                source.report.refuse(line.place, "nested too deeply")
            else:
                yield from found


class _Reader:
    """The trajectories of one line: those of its document and of the subagents in it."""

    def __init__(self, line: Line, source: Source) -> None:
        self._line = line
        self._run_id = source.run_id
        self._report = source.report
        self._left_out = source.report.left_out

    def rollouts(self, fields: dict[str, Any], within: tuple[str, ...]) -> Iterator[Rollout]:
        """Yield the trajectory of a document, and those of its subagents.

        Args:
            within: the trace ids of the documents around it, and its place among its siblings.
        """
        document = read_document(fields)
        self._left_out.update(
            f"fields of {part} that ATIF 1.8 does not have" for part in unknown_fields(fields)
        )
        extra = dict(document.extra or {})
        trace_id = self._trace_id(document, within)
        calls = Calls(document, trace_id, self._line.modified_ns, self._left_out)
        start_ns = min((one.start_ns for one in calls.made), default=self._line.modified_ns)
        end_ns = max((one.start_ns + one.duration_ns for one in calls.made), default=start_ns)
        place, verdict = ({}, {}) if within else self._trial()
        fields_of_row = place | take_fields(extra, but="agent")
        self._left_out[_OUTCOMES] += bool(extra.pop("outcomes", None))
        values = _noted(document)
        values |= {"parent_trace_id": within[-2]} if within else {}
        values |= verdict | _attributes(extra)
        yield Rollout(
            trace_id=trace_id,
            calls=tuple(calls.made),
            start_ns=start_ns,
            duration_ns=max(0, end_ns - start_ns),
            agent=None if document.agent.name == "unknown" else document.agent.name,
            size_bytes=0 if within else len(self._line.data),
            values=values,
            is_export=trace_id == document.trajectory_id,
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
        own_id = (document.extra or {}).get("trace_id")
        is_id = isinstance(own_id, str) and _TRACE_ID.fullmatch(own_id) is not None
        if is_id and own_id == document.trajectory_id:
            return str(own_id)
        place = within
        if not within and document.session_id is None and document.trajectory_id is None:
            # Two rollouts may be equal, so a document that is named by nothing is told by its file.
            place = (*self._line.path.parts[-4:], str(self._line.number))
        return digest_id(16, "trace", self._run_id, *place, self._line.data).hex()


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
