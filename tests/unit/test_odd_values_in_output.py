"""Values for which formats have no word: NaN, infinities, halves of characters, dates far away."""

from __future__ import annotations

import csv
import io
import json
import math
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import localtrace
from localtrace.errors import QueryError
from localtrace.read.result import Result, python_values
from localtrace.values.plain_json import plain_json
from tests.commands import run
from tests.recording import recording
from tests.unit.test_viewer_pages import Pages

ODD = [math.nan, math.inf, -math.inf, None, 0.5]
WORDS = ["NaN", "Infinity", "-Infinity", None, 0.5]
FAR = {
    "date 'infinity'": "infinity",
    "date '-infinity'": "-infinity",
    "date '290000-03-01'": "290000-03-01",
    "date '0044-03-15 (BC)'": "0044-03-15 (BC)",
    "timestamp 'infinity'": "infinity",
    "timestamp '-infinity'": "-infinity",
    "timestamptz 'infinity'": "infinity",
    "timestamptz '290000-02-28 23:59:58.5+00'": "290000-02-28 23:59:58.500000+00",
    "timestamp '0001-01-01 (BC)'": "0001-01-01 (BC) 00:00:00",
    "timestamp_s '290000-01-01'": "290000-01-01 00:00:00",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of one group with odd rewards, and half of a character in every text."""

    @localtrace.op
    def generate(messages: list[dict[str, str]]) -> dict[str, str]:
        return {"output_text": f"{messages[0]['content']}\udc00"}

    path = tmp_path_factory.mktemp("odd") / "store"
    with recording(path, run_id="run"):
        for n, reward in enumerate(ODD):
            with localtrace.trajectory(
                step=1, sample_index="s\ud800", rollout_n=n, group_id="g"
            ) as t:
                generate([{"role": "user", "content": "say \ud800"}])
                t.set(note="n\ud800", odd=math.nan)
                if reward is not None:
                    t.set(reward=reward)
            localtrace.outcome(t.trace_id, score=math.nan, text="c\ud800")
    return path


def printed(store: Path, *arguments: str, form: str) -> Any:
    result = run(*arguments, "-s", store, "--format", form)
    assert result.exit_code == 0, result.output
    if form == "parquet":
        return pq.read_table(io.BytesIO(result.stdout_bytes)).to_pylist()
    result.stdout_bytes.decode()  # valid
    if form == "json":
        return json.loads(result.stdout)
    if form == "csv":
        return list(csv.DictReader(io.StringIO(result.stdout)))
    return result.stdout


@pytest.mark.parametrize("arguments", [
    ("ls", "--sort", "rollout_n"), ("group", "g"),
    ("sql", "select reward from trajectories order by rollout_n"),
])  # fmt: skip
def test_a_value_that_is_not_finite_differs_from_null_in_every_format(
    store: Path, arguments: tuple[str, ...]
) -> None:
    found = {form: [row["reward"] for row in printed(store, *arguments, form=form)]
             for form in ("json", "csv", "parquet")}  # fmt: skip
    assert found["json"] == WORDS
    assert found["csv"] == ["nan", "inf", "-inf", "", "0.5"]
    assert list(map(str, found["parquet"])) == ["nan", "inf", "-inf", "None", "0.5"]
    table = printed(store, *arguments, form="table")
    assert all(word in table for word in ("nan", "inf", "-inf"))


@pytest.mark.parametrize("form", ["json", "csv", "table", "parquet"])
@pytest.mark.parametrize("arguments", [
    ("ls",), ("ls", "--columns", "prompt,answer"), ("group", "g"), ("runs",), ("stats",),
    ("query", "text_hits", "text=say"), ("query", "slowest_ops"),
    ("sql", "select * from spans"), ("sql", "select * from turns"),
    ("sql", "select * from all_outcomes"), ("sql", "select * from messages"),
])  # fmt: skip
def test_half_a_character_ends_no_output(
    store: Path, arguments: tuple[str, ...], form: str
) -> None:
    assert printed(store, *arguments, form=form)


@pytest.mark.parametrize("sql", FAR)
@pytest.mark.parametrize("form", ["json", "csv", "table"])
def test_a_date_that_python_cannot_hold_is_text(store: Path, sql: str, form: str) -> None:
    found = printed(store, "sql", f"select {sql} as x, 1 as y", form=form)
    assert FAR[sql] in found if form == "table" else found[0]["x"] == FAR[sql]


def test_far_dates_inside_of_others_are_text_too(store: Path) -> None:
    sql = (
        "select [date 'infinity', null, date '2026-01-02'] as x, {'a': timestamp '-infinity'} as y"
    )
    assert printed(store, "sql", sql, form="json") == [
        {"x": ["infinity", None, "2026-01-02"], "y": {"a": "-infinity"}}
    ]
    with localtrace.open_store(store) as opened:
        (row,) = opened.sql(sql).to_dicts()
        assert row == {"x": ["infinity", None, date(2026, 1, 2)], "y": {"a": "-infinity"}}
        assert [*opened.sql(sql)] == [row]
        assert "-infinity" in opened.sql(sql)._repr_html_()
        with pytest.raises(QueryError, match="::varchar"):
            opened.sql("select date 'infinity' as x").to_pandas()


@pytest.mark.parametrize("sql", ["interval '3 days'", "union_value(a := 1)"])
def test_what_parquet_cannot_hold_is_one_clear_line(store: Path, sql: str) -> None:
    result = run("sql", f"select {sql} as x", "-s", store, "--format", "parquet")
    assert (result.exit_code, result.stdout_bytes) == (2, b"")
    assert "::varchar" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_viewers_page_of_sql_shows_them_all(store: Path) -> None:
    columns = ", ".join(f"{sql} as c{at}" for at, sql in enumerate(FAR))
    address = urlencode({"sql": f"select {columns}, 'nan'::double as x"})
    with localtrace.open_store(store) as opened:
        client = Pages(opened, {}).client
        (row,) = client.get(f"/sql.json?{address}").json()["rows"]
        assert row == [*FAR.values(), "NaN"]
        told = client.get(f"/sql/rows.csv?{address}").text.splitlines()[1]
        assert told.split(",") == [*FAR.values(), "nan"]
        assert client.get(f"/sql/rows.parquet?{address}").status_code == 200
        refused = client.get("/sql/rows.parquet?sql=select+interval+'3+days'+as+x")
        assert refused.status_code == 400
        assert "::varchar" in refused.text


@given(st.dates(), st.integers(-30, 30))
def test_a_far_date_is_that_of_the_calendar_400_years_away(near: date, cycles: int) -> None:
    days = (near - date(1970, 1, 1)).days + 146_097 * cycles
    (found,) = python_values(pa.array([days], pa.date32()))
    year = near.year + 400 * cycles
    if 1 <= year <= 9999:
        assert found == near.replace(year=year)
    else:
        wanted = f"{year:04}-{near:%m-%d}" if year > 0 else f"{1 - year:04}-{near:%m-%d} (BC)"
        assert found == wanted


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_times_of_any_size_come_back(values: list[int]) -> None:
    found = Result(pa.table({"x": pa.array(values, pa.timestamp("us", tz="UTC"))})).to_dicts()
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    for value, row in zip(values, found, strict=True):
        if isinstance(row["x"], datetime):
            assert row["x"] == epoch + timedelta(microseconds=value)
        else:
            assert not -62135596800 * 10**6 <= value < 253402300800 * 10**6


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda one: st.one_of(st.lists(one), st.dictionaries(st.text(), one)),
)


@given(JSON)
def test_plain_json_is_valid_for_strict_readers(value: Any) -> None:
    text = json.dumps(plain_json(value), allow_nan=False, ensure_ascii=False)
    text.encode()
    assert json.loads(text) == plain_json(value)


@given(st.floats())
def test_a_float_in_plain_json_is_itself_or_its_word(value: float) -> None:
    words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    assert plain_json([value]) == [words.get(str(value), value)]
