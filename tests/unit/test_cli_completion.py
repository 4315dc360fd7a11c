"""`localtrace completion`: scripts, and what they are answered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from localtrace.cli import COMMANDS
from tests.commands import record, run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for run_id in ("run-a", "run-b", "bad$(touch x)"):
        record(tmp_path / "store", [{}], run_id=run_id)
    assert run("seal", "-s", tmp_path / "store").exit_code == 0
    return tmp_path / "store"


def completed(line: str, store: Path | None = None, shell: str = "bash") -> list[str]:
    """Return what a shell is told to offer after a line; bash has split it at =."""
    words = line.replace("=", " = ").split(" ") if shell == "bash" else line.split(" ")
    environment = {
        "PATH": "/usr/bin:/bin",
        "COMP_WORDS": " ".join(word for word in words if word),
        "COMP_CWORD": str(len([word for word in words if word]) - (words[-1] != "")),
        "_LOCALTRACE_COMPLETE": f"{shell}_complete",
        **({} if store is None else {"LOCALTRACE_STORE": str(store)}),
    }
    code = "from localtrace.cli import main; main(prog_name='localtrace')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return [offer.split(",", 1)[1] for offer in done.stdout.splitlines() if offer]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_printed_for_each_shell_and_help_says_where_to_put_it(shell: str) -> None:
    assert "_LOCALTRACE_COMPLETE" in run("completion", shell).stdout
    assert f"localtrace completion {shell} >" in run("completion", "--help").stdout


def test_bash_accepts_the_script() -> None:
    script = run("completion", "bash").stdout
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_commands_and_options_are_completed() -> None:
    assert completed("localtrace gr") == ["group"]
    assert set(completed("localtrace ")) == set(COMMANDS)
    assert completed("localtrace ls --form") == ["--format"]


def test_queries_and_their_parameters_are_completed() -> None:
    assert completed("localtrace query reward_by") == ["reward_by_step"]
    assert set(completed("localtrace query reward_by_step ")) == {
        "run=", "project=", "experiment=", "attempt=", "step=", "validate=",
    }  # fmt: skip


def test_filters_and_the_runs_of_the_store_are_completed(store: Path) -> None:
    assert completed("localtrace ls sta", store) == ["status="]
    assert sorted(completed("localtrace ls run=", store)) == ["run-a", "run-b"]
    assert completed("localtrace ls run=run-b", store) == ["run-b"]


def test_the_runs_of_every_store_are_completed(store: Path, tmp_path: Path) -> None:
    record(tmp_path / "second", [{}], run_id="run-c")
    assert run("seal", "-s", tmp_path / "second").exit_code == 0
    assert sorted(completed("localtrace ls run=", tmp_path / "s*")) == ["run-a", "run-b", "run-c"]
    line = f"localtrace ls -s {store} -s {tmp_path}/second run=run-c"
    assert completed(line) == ["run-c"]


def test_without_a_store_nothing_is_offered_and_nothing_is_said(tmp_path: Path) -> None:
    assert completed("localtrace ls run=", tmp_path / "nowhere") == []
    assert completed("localtrace query nothing ") == []


def test_names_of_commands_are_completed_without_importing_them() -> None:
    code = (
        "import sys; from localtrace.cli import main; import click\n"
        "main.shell_complete(click.Context(main), 's')\n"
        "assert not any(name.startswith('localtrace.cli.') for name in sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
