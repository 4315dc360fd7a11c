"""The fields of MLflow's answers that an upload reads; others are skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from localtrace.uploader.targets import Entry
from localtrace.uploader.targets.mlflow_spans import DIGEST_TAG

Id = Annotated[str, msgspec.Meta(pattern="^[!-~]{1,250}$")]
"""An id in ASCII without spaces, because ids are sent in headers."""


class Experiment(msgspec.Struct):
    experiment_id: Id
    creation_time: int
    lifecycle_stage: str = "active"


class ExperimentAnswer(msgspec.Struct):
    experiment: Experiment


class RunInfo(msgspec.Struct):
    run_id: Id


class Tag(msgspec.Struct):
    """A tag or parameter of a run."""

    key: str
    value: str = ""


class RunData(msgspec.Struct):
    tags: list[Tag] = []
    params: list[Tag] = []


class Run(msgspec.Struct):
    info: RunInfo
    data: RunData = msgspec.field(default_factory=RunData)

    def tag(self, key: str) -> str:
        """Return the value of a tag; empty if it is missing."""
        return next((tag.value for tag in self.data.tags if tag.key == key), "")


class RunAnswer(msgspec.Struct):
    run: Run


class RunsAnswer(msgspec.Struct):
    runs: list[Run] = []


class Assessment(msgspec.Struct):
    assessment_id: str


class Trace(msgspec.Struct):
    trace_id: str
    tags: dict[str, str] = {}
    assessments: list[Assessment] = []

    def holds_all(self, entry: Entry) -> bool:
        """Return whether the entry's assessment is attached, if it has one."""
        attached = {assessment.assessment_id for assessment in self.assessments}
        return entry.assessment_id is None or entry.assessment_id in attached


class InfosAnswer(msgspec.Struct):
    trace_infos: list[Trace] = []


class SearchAnswer(msgspec.Struct):
    traces: list[Trace] = []
    next_page_token: str = ""


def found(entries: Mapping[str, Entry], traces: Sequence[Trace]) -> dict[str, bool]:
    """Find the entries that are complete among these traces.

    Args:
        entries: the entries by their id at MLflow.

    Returns:
        For each of them, by trace id, whether its digest is the same.
    """
    whole: dict[str, bool] = {}
    for trace in traces:
        entry = entries.get(trace.trace_id)
        if entry is None:
            continue
        is_same = trace.tags.get(DIGEST_TAG) == entry.digest
        if not is_same or trace.holds_all(entry):
            whole[entry.trace_id] = is_same
    return whole
