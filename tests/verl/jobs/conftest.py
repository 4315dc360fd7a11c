"""A verl configuration composed by hydra, and a process that no test before has told anything."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import localtrace
from localtrace.trainer_hooks.verl import job
from tests.environment import as_new_process, unavailable


@pytest.fixture(autouse=True)
def _fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("LOCALTRACE_")]:
        monkeypatch.delenv(name)
    # The hook itself sets these; monkeypatch puts back what was there before.
    for name in ("STORE", "RUN_ID", "ATTEMPT", "JOURNAL_DIR"):
        monkeypatch.setenv(f"LOCALTRACE_{name}", "")
        monkeypatch.delenv(f"LOCALTRACE_{name}")
    monkeypatch.setenv("LOCALTRACE_MIN_FREE_BYTES", "0")
    monkeypatch.setenv("LOCALTRACE_SEAL", "0")
    job.remember(None)
    as_new_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    yield
    localtrace.close()
    job.remember(None)


Compose = Callable[..., Any]


@pytest.fixture
def compose(tmp_path: Path) -> Compose:
    """Composes verl's own trainer configuration with overrides; checkpoints lie in tmp_path."""
    try:
        import verl
        from hydra import compose as hydra_compose
        from hydra import initialize_config_dir
    except ImportError as error:
        unavailable(str(error))
    folder = Path(verl.__file__).parent / "trainer" / "config"

    def composed(*overrides: str, backend: str = "localtrace") -> Any:
        chosen = [
            f"actor_rollout_ref.rollout.trace.backend={backend}",
            "trainer.project_name=gsm8k",
            "trainer.experiment_name=grpo",
            f"trainer.default_local_dir={tmp_path}/runs/checkpoints",
            *overrides,
        ]
        with initialize_config_dir(str(folder), version_base=None):
            return hydra_compose("ppo_trainer", overrides=chosen)

    return composed
