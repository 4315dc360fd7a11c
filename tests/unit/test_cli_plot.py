"""`localtrace query --plot`: numbers by step as lines."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest

from localtrace.cli.plot import Line, charts, drawn, save
from localtrace.errors import QueryError
from tests.commands import record, run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    rollouts = [{"step": step, "reward": step / 10} for step in (1, 2, 3)]
    record(tmp_path / "store", rollouts)
    return tmp_path / "store"


def test_a_query_is_drawn_on_the_terminal(store: Path) -> None:
    result = run("query", "-s", store, "reward_by_step", "--plot")
    assert result.exit_code == 0, result.output
    assert "(mean_reward)" in result.stdout
    assert "(step)" in result.stdout


def test_a_picture_is_written_as_png_or_svg(store: Path, tmp_path: Path) -> None:
    for ending, start in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = tmp_path / f"picture{ending}"
        result = run("query", "-s", store, "reward_by_step", "--plot-file", path)
        assert (result.exit_code, result.stdout) == (0, ""), result.output
        assert path.read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slowest_ops", "--plot"], "column step"),
        (["reward_by_step", "--plot-file", "picture.pdf"], ".png or .svg"),
        (["reward_by_step", "--plot", "--format", "csv"], "--plot and --format"),
    ],
)
def test_what_cannot_be_plotted_is_said(store: Path, words: list[str], said: str) -> None:
    record(store, [])
    sql = "-- Nothing by step.\n-- params:\nselect 'a' as op, 1.5 as seconds"
    (store.parent / "slowest_ops.sql").write_text(sql)
    result = run("query", "-s", store, "--queries", store.parent, *words)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(("file", "package"), [(None, "plotille"), ("x.png", "matplotlib")])
def test_a_missing_package_is_named_with_how_to_install_it(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str | None, package: str
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    where = ["--plot"] if file is None else ["--plot-file", tmp_path / file]
    result = run("query", "-s", store, "reward_by_step", *where)
    assert result.exit_code == 1
    assert package in result.stderr
    assert 'pip install "localtrace[plot]"' in result.stderr


def table(**columns: list[Any]) -> pa.Table:
    return pa.table(columns)


def test_columns_that_tell_rows_of_a_step_apart_make_the_lines() -> None:
    (chart,) = charts(
        table(
            run_id=["r"] * 4, step=[1, 1, 2, 2], k=[1, 2, 1, 2], n=[9] * 4, p=[0.1, 0.2, 0.3, 0.4]
        )
    )
    assert chart.column == "p"
    assert chart.lines == [Line("k 1", [1, 2], [0.1, 0.3]), Line("k 2", [1, 2], [0.2, 0.4])]


def test_text_after_the_numbers_makes_no_line_of_its_own() -> None:
    (chart,) = charts(table(step=[1, 2], mean=[0.5, None], verdict=["good", "bad"]))
    assert chart.lines == [Line("", [1], [0.5])]


def test_counts_are_drawn_where_there_is_nothing_else() -> None:
    assert [chart.column for chart in charts(table(step=[1], hits=[3]))] == ["hits"]


def test_rows_that_nothing_tells_apart_are_refused() -> None:
    with pytest.raises(QueryError, match="several rows of a step"):
        charts(table(step=[1, 1], mean=[0.5, 0.6]))


def test_too_many_lines_are_cut_and_counted() -> None:
    (chart,) = charts(table(run=[f"r{n:02}" for n in range(13)], step=[1] * 13, mean=[0.5] * 13))
    assert (len(chart.lines), chart.left_out) == (10, 3)


def test_recorded_text_is_neither_terminal_command_nor_formula(tmp_path: Path) -> None:
    hostile = ["\x1b]0;x\x07", "$\\frac{", "_hidden"]
    (chart,) = charts(table(run_id=hostile, step=[1, 1, 1], mean=[0.1, 0.2, 0.3]))
    assert "\x1b" not in drawn(chart, 80, coloured=False)
    save([chart], tmp_path / "x.svg")
    assert ElementTree.parse(tmp_path / "x.svg") is not None
