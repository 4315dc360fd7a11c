"""A job of verl is recorded under the names of its rollout traces, else of its trainer."""

from __future__ import annotations

from typing import Any

import pytest

from localtrace.trainer_hooks.verl import job

TRAINER = {"project_name": "p", "experiment_name": "e"}


def config_of(backend: str | None, **trace: Any) -> Any:
    rollout = {"trace": {"backend": backend, **trace}}
    return {"trainer": TRAINER, "actor_rollout_ref": {"rollout": rollout}}


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (config_of("localtrace", project_name="tp", experiment_name="te"), ["tp", "te"]),
        (config_of("localtrace+mlflow", project_name="tp"), ["tp", "e"]),
        (config_of("localtrace", project_name=None, experiment_name=""), ["p", "e"]),
        (config_of("mlflow", project_name="tp"), ["p", "e"]),
        (config_of(None, project_name="tp"), ["p", "e"]),
        ({"trainer": {}}, [None, None]),
        (None, [None, None]),
    ],
)
def test_names_of_the_traces_come_first(config: Any, names: list[str | None]) -> None:
    assert [job.named(config, key) for key in ("project", "experiment")] == names
