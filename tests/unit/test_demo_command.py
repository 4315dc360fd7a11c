"""`localtrace demo`, as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import localtrace
from localtrace.cli import main
from localtrace.demo.run import record, run_demo
from localtrace.demo.train import DemoConfig

TINY = DemoConfig(
    steps=2, warm_up_steps=5, problems_per_step=4, group_size=4, validation_problems=4
)


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not touch")

    result = CliRunner().invoke(main, ["demo", str(tmp_path)])

    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr
    assert "localtrace demo another-folder" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_second_demo_in_the_same_folder_is_one_more_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALTRACE_SEAL", "0")
    (tmp_path / "demo").mkdir()
    first = record(tmp_path / "demo", TINY)
    run_demo(tmp_path / "demo", TINY, upload=False)

    with localtrace.open_store(tmp_path / "demo" / "store") as store:
        runs = {row["run_id"]: row["closed_processes"] for row in store.runs().to_dicts()}
    (second,) = runs.keys() - {first}
    assert runs == {first: 1, second: 1}
    shown = capfd.readouterr().out
    assert f"group run={second} step=2 " in shown
    assert shown.count("\ntrajectory ") == 1
    assert first not in shown


@pytest.mark.parametrize("package", ["torch", "tokenizers", "mlflow"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "localtrace.cli.demo.find_spec", lambda name: None if name == package else 1
    )

    result = CliRunner().invoke(main, ["demo", str(tmp_path / "demo")])

    assert result.exit_code == 1
    assert package in result.stderr
    assert "localtrace[demo]" in result.stderr
    assert not (tmp_path / "demo").exists()
