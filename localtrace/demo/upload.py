"""The demo's upload to MLflow, checked with MLflow's own client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING

from localtrace.read.filters import Filters
from localtrace.uploader import TargetOptions, upload

if TYPE_CHECKING:
    from localtrace.read.store import Store
    from localtrace.uploader.receipts import Receipt


def upload_to_mlflow(store: Store, selection: Filters, target: str) -> Iterator[str]:
    """Upload a selection with its rewards as assessments; yield lines about the result."""
    receipt = upload(store, selection, target, options=TargetOptions(assessments=True))
    counts = receipt.counts
    yield f"  {counts['sent']} trajectories sent, {counts['verified']} read back by the uploader"
    yield from _read_back(receipt)


def _read_back(receipt: Receipt) -> Iterator[str]:
    os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true")
    from mlflow import MlflowClient

    (run,) = receipt.runs
    traces = MlflowClient(receipt.target).search_traces(
        locations=[run.place.experiment],
        filter_string=f"run_id = '{run.place.run}'",
        max_results=500,
    )
    spans = sum(len(trace.data.spans) for trace in traces)
    judged = [one for trace in traces for one in trace.info.assessments]
    rewards = [one.value for one in judged if one.name == "reward"]
    tags = {name for trace in traces for name in trace.info.tags if not name.startswith("mlflow.")}
    yield f"  MLflow's own client finds {len(traces)} traces with {spans} spans"
    yield f"  run {run.place.run} of experiment {run.container}"
    yield f"  tags: {', '.join(sorted(tags))}"
    yield f"  assessments: {len(rewards)} rewards, mean {fmean(rewards):.2f}"
