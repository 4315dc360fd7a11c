"""The same job in three processes: without the hook, with it, and recorded."""

from __future__ import annotations

import pytest

from tests.verl.matrix.jobs import HOOK, NO_HOOK, Job, run_job


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """The three jobs."""
    wanted = {
        "without the hook": ("mlflow", NO_HOOK),
        "live": ("mlflow", HOOK),
        "recorded": ("localtrace", HOOK),
    }
    finished = {
        name: run_job(tmp_path_factory.mktemp("job"), backend, variables)
        for name, (backend, variables) in wanted.items()
    }
    for name, job in finished.items():
        assert job.result, f"the job failed: {name}\n{job.messages}"
    return finished


@pytest.fixture
def without(jobs: dict[str, Job]) -> Job:
    """verl alone, tracing live into MLflow."""
    return jobs["without the hook"]


@pytest.fixture
def live(jobs: dict[str, Job]) -> Job:
    """The hook is loaded and nobody asked for it: verl traces live into MLflow."""
    return jobs["live"]


@pytest.fixture
def recorded(jobs: dict[str, Job]) -> Job:
    """Recorded by localtrace."""
    return jobs["recorded"]
