"""Jobs of a trainer that the environment tells to record, and what they recorded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localtrace
from tests.environment import as_new_process

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("LOCALTRACE_")]:
        monkeypatch.delenv(name)
    as_new_process(monkeypatch)
    yield
    localtrace.close()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store that the environment names; the hook starts the recording."""
    path = tmp_path / "store"
    variables = {"STORE": path, "SEAL": 0, "MIN_FREE_BYTES": 0, "TRAINER_TOKENS": 1}
    for name, value in variables.items():
        monkeypatch.setenv(f"LOCALTRACE_{name}", str(value))
    return path


def read(store: Path) -> list[Any]:
    """All trajectories with their spans and newest outcomes, in the order in which they ended."""
    localtrace.flush()
    with localtrace.open_store(store) as opened:
        rows = opened.sql("select trace_id from all_trajectories order by writer_seq").to_dicts()
        return list(opened.read([row["trace_id"] for row in rows]))


def sql(store: Path, text: str) -> list[dict[str, Any]]:
    """The rows that a query finds."""
    localtrace.flush()
    with localtrace.open_store(store) as opened:
        return list(opened.sql(text).to_dicts())
