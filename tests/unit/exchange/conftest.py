"""A store with a run to hand on, and the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from localtrace.cli import main
from tests.unit.exchange.rollouts import record

Command = Callable[..., Result]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command line; a full disk of this machine stops no import."""
    monkeypatch.setenv("LOCALTRACE_MIN_FREE_BYTES", "0")
    return lambda *arguments: CliRunner().invoke(main, [str(one) for one in arguments])


@pytest.fixture
def rows(command: Command) -> Callable[[Path, str], list[dict[str, Any]]]:
    """Runs SQL on a store."""

    def run(store: Path, sql: str) -> list[dict[str, Any]]:
        result = command("sql", sql, "-s", store, "--format", "json")
        assert result.exit_code == 0, result.output
        found: list[dict[str, Any]] = json.loads(result.stdout)
        return found

    return run


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    return tmp_path / "store", record(tmp_path / "store")
