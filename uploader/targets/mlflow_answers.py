"""The parts of MLflow's answers that an upload reads; the rest is passed over."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from localtrace.uploader.targets import Entry
from localtrace.uploader.targets.mlflow_spans import DIGEST_TAG


class Experiment(msgspec.Struct):
    experiment_id: str
    creation_time: int
    lifecycle_stage: str = "active"


class ExperimentAnswer(msgspec.Struct):
    experiment: Experiment


class RunInfo(msgspec.Struct):
    run_id: str


class Run(msgspec.Struct):
    info: RunInfo


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

    def holds(self, entry: Entry) -> bool:
        """Whether this is the entry, with the same content."""
        attached = {assessment.assessment_id for assessment in self.assessments}
        wanted = {entry.assessment_id} - {None}
        return self.tags.get(DIGEST_TAG) == entry.digest and wanted <= attached


class InfosAnswer(msgspec.Struct):
    trace_infos: list[Trace] = []


class SearchAnswer(msgspec.Struct):
    traces: list[Trace] = []
    next_page_token: str = ""


def held(entries: Sequence[Entry], traces: Sequence[Trace]) -> set[str]:
    """Trace ids of the entries that are among these traces, with the same content."""
    by_id = {trace.trace_id: trace for trace in traces}
    return {
        entry.trace_id
        for entry in entries
        if (trace := by_id.get(entry.remote_id)) is not None and trace.holds(entry)
    }
