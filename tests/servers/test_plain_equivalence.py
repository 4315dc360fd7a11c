"""A replay beside the live traces of plain `mlflow.trace`: these differences, and no others."""

from __future__ import annotations

from pathlib import Path

import mlflow
from mlflow import MlflowClient

import localtrace
from localtrace.read.filters import Filters
from localtrace.uploader import upload
from tests.servers.equivalence.plain import run_traced
from tests.servers.equivalence.trees import Comparison
from tests.servers.test_equivalence import mlflow_trees

DIFFERENCES = {
    # The qualified name tells functions apart that share the last part of theirs.
    "[0]: 'run' and 'run_traced.<locals>.run'",
    "/run tag mlflow.traceName: 'run' and 'run_traced.<locals>.run'",
    "/run[0]: 'look_up' and 'run_traced.<locals>.look_up'",
    "/run[1]: 'look_up' and 'run_traced.<locals>.look_up'",
    "/run[2]: 'wait' and 'run_traced.<locals>.wait'",
    # NaN is text, which browsers can read.
    "/run outputs[1][0].score: 'nan' and 'nan'",
    "/run/look_up outputs.score: 'nan' and 'nan'",
    # A cancelled call has failed.
    "/run/wait status[0]: 'OK' and 'ERROR'",
    "/run/wait status[1]: '' and 'CancelledError: '",
    "/run/wait attribute mlflow.spanLogLevel: '10' and '40'",
}


def test_mlflow_shows_the_same_as_after_plain_live_tracing(mlflow_url: str, tmp_path: Path) -> None:
    mlflow.set_tracking_uri(mlflow_url)
    mlflow.set_experiment("plain live")
    run_traced(mlflow.trace, tmp_path / "store")
    mlflow.flush_trace_async_logging()
    with localtrace.open_store(tmp_path / "store") as store:
        assert upload(store, Filters(), mlflow_url, container="plain replay").complete
    client = MlflowClient(mlflow_url)
    live, ours = (mlflow_trees(client, name) for name in ("plain live", "plain replay"))
    for root in (*live, *ours):
        del root.facts["previews"]  # spaces after commas
    compared = Comparison().forests(live, ours)
    assert set(compared.differences) == DIFFERENCES
    assert {fact for fact in compared.only_live if not fact.startswith("metadata mlflow.")} == {
        "attribute mlflow.spanFunctionName", "exception stacktrace",
    }  # fmt: skip
    assert not any(fact.startswith("metadata") for fact in compared.only_ours)
    assert compared.dropped == set()
