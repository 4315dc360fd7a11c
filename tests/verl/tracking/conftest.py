"""A process whose trainer has logged nothing yet, and the loggers that verl has made."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localtrace.trainer_hooks.verl import tracking
from tests.recording import Recording
from tests.verl.jobs.conftest import _fresh_process, compose

__all__ = ["_fresh_process", "compose"]

MakeTracking = Callable[..., Any]


@pytest.fixture(autouse=True)
def _first_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_announced", False)
    monkeypatch.setattr(tracking, "_survey", tracking.Survey())
    monkeypatch.setattr(tracking, "managers", weakref.WeakSet())


@pytest.fixture
def make_tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeTracking:
    """Makes verl's real Tracking, as its trainers do."""
    from verl.utils.tracking import Tracking

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", f"{tmp_path}/metrics.jsonl")

    def made(*loggers: str, backend: str | None = None) -> Any:
        trainer = {
            "project_name": "gsm8k",
            "experiment_name": "grpo",
            "logger": list(loggers),
            "default_local_dir": f"{tmp_path}/runs/checkpoints",
        }
        config = {
            "trainer": trainer,
            "actor_rollout_ref": {"rollout": {"trace": {"backend": backend}}},
        }
        return Tracking(
            project_name="gsm8k",
            experiment_name="grpo",
            default_backend=list(loggers),
            config=config,
        )

    return made


@pytest.fixture
def store(tmp_path: Path) -> Recording:
    """The store into which the trackings of a test record."""
    return Recording(tmp_path / "runs/localtrace")


def recorded(store: Recording) -> list[tuple[int, str, float]]:
    """Step, name and value of every metric."""
    return [(row["step"], row["name"], row["value"]) for row in store.rows("metrics")]
