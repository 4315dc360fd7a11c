"""Completion by the TAB key: click's own, with filters, queries, views and runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from localtrace.cli import COMMANDS
from localtrace.read.filter_registry import FILTERS
from tests.commands import record, run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for run_id in ("run-a", "run-b", "bad$(touch x)"):
        record(tmp_path / "store", [{}], run_id=run_id)
    assert run("seal", "-s", tmp_path / "store").exit_code == 0
    return tmp_path / "store"


def completed(line: str, store: Path | None = None) -> list[str]:
    """Return what a shell is told to offer after a line."""
    words = line.split(" ")
    environment = {
        "PATH": "/usr/bin:/bin",
        "COMP_WORDS": " ".join(words[:-1] + words[-1:] * bool(words[-1])),
        "COMP_CWORD": words[-1],
        "_LOCALTRACE_COMPLETE": "fish_complete",
        **({} if store is None else {"LOCALTRACE_STORE": str(store)}),
    }
    code = "from localtrace.cli import main; main(prog_name='localtrace')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return [
        offer.split(",", 1)[1].partition("\t")[0] for offer in done.stdout.splitlines() if offer
    ]


def test_commands_options_views_and_queries_are_completed() -> None:
    assert set(completed("localtrace ")) == set(COMMANDS)
    assert completed("localtrace ls --form") == ["--format"]
    assert completed("localtrace describe traj") == ["trajectories"]
    assert completed("localtrace query reward_by") == ["reward_by_step"]


@pytest.mark.parametrize("command", ["ls", "query reward_by_step", "upload", "group"])
def test_filters_and_their_values_are_completed(command: str) -> None:
    assert completed(f"localtrace {command} ") == [f"{key}=" for key in FILTERS]
    assert completed(f"localtrace {command} fate=a") == ["fate=aborted"]
    assert completed(f"localtrace {command} empty=") == ["empty=true", "empty=false"]


def test_the_runs_of_every_store_are_completed_but_not_what_a_shell_would_expand(
    store: Path, tmp_path: Path
) -> None:
    record(tmp_path / "second", [{}], run_id="run-c")
    assert run("seal", "-s", tmp_path / "second").exit_code == 0
    assert sorted(completed("localtrace ls run=", store)) == ["run=run-a", "run=run-b"]
    assert len(completed("localtrace ls run=", tmp_path / "s*")) == 3
    line = f"localtrace ls -s {store} -s {tmp_path}/second run=run-c"
    assert completed(line) == ["run=run-c"]


def test_without_a_store_nothing_is_offered_and_nothing_is_said(tmp_path: Path) -> None:
    assert completed("localtrace ls run=", tmp_path / "nowhere") == []
