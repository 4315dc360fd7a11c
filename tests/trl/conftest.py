"""A tiny model, and a store that a trainer records into."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localtrace
from localtrace import testing
from tests.environment import unavailable
from tests.recorded_jobs import read, sql

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

try:
    import trl  # noqa: F401
except ImportError:
    unavailable("trl is not installed")


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("LOCALTRACE_")]:
        monkeypatch.delenv(name)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    yield
    localtrace.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    from tests.trl.training import make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny")


class Stored:
    """The content of a store."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def sql(self, text: str) -> list[dict[str, Any]]:
        """The rows that a query finds in what was recorded so far."""
        return sql(self.path, text)

    def rollouts(self) -> list[Any]:
        """All trajectories with their spans and newest outcomes, in the order in which they ended.

        That is the order of the batches, and within a batch that of its rows.
        """
        return read(self.path)


@pytest.fixture
def stored(tmp_path: Path, _fresh_process: None) -> Iterator[Stored]:
    """The rows that are recorded during a test."""
    with testing.recording(tmp_path / "store") as path:
        yield Stored(path)
