"""Named queries, and what user SQL is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localtrace.errors import QueryError
from localtrace.read.named_queries import find_query, load_queries
from localtrace.read.store import Store
from tests.snapshots import Row, store_of

TABLES: dict[str, list[Row]] = {
    "runs": [{"run_id": "run"}],
    "trajectories": [
        {
            "trace_id": f"{step}-{n}", "step": step, "sample_index": "0", "reward": float(n),
            "validate": n == 2, "turn_count": n + 1, "output_tokens": 10 * (n + 1),
        }
        for step in (1, 2)
        for n in (0, 1, 2)
    ],
    "spans": [
        {"trace_id": "1-0", "span_id": "1", "step": 1, "op": "fast", "end_ns": 10**6},
        {"trace_id": "1-0", "span_id": "2", "step": 1, "op": "slow", "end_ns": 3 * 10**6},
        {"trace_id": "2-0", "span_id": "3", "step": 2, "op": "slow", "end_ns": 10**6,
         "status": "error", "error": "ValueError: no: no"},
        {"trace_id": "e", "span_id": "4", "step": 3, "op": "sglang.generate", "end_ns": 1},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def full() -> Iterator[Store]:
    with store_of(**TABLES) as store:
        yield store


@pytest.fixture(scope="module")
def empty() -> Iterator[Store]:
    with store_of() as store:
        yield store


def test_rewards_by_step_keep_validation_apart() -> None:
    with store_of(**TABLES) as store:
        first, _ = store.query("reward_by_step", run="run").to_dicts()
    assert (first["step"], first["trajectories"], first["mean_reward"]) == (1, 2, 0.5)
    assert first["validation_reward"] == 2.0


def test_lengths_are_those_of_training() -> None:
    with store_of(**TABLES) as store:
        first, _ = store.query("length_by_step").to_dicts()
    assert (first["mean_tokens"], first["max_turns"]) == (15.0, 2)


def test_a_spread_of_groups_counts_those_that_teach_nothing() -> None:
    same = [{"trace_id": f"s{n}", "step": 1, "sample_index": "1", "reward": 1.0} for n in (0, 1)]
    with store_of(trajectories=[*TABLES["trajectories"], *same]) as store:
        first, _ = store.query("group_spread").to_dicts()
    assert (first["groups"], first["zero_variance_groups"]) == (2, 1)
    assert first["zero_variance_share"] == 0.5


def test_the_slowest_op_comes_first_and_steps_may_be_text() -> None:
    with store_of(**TABLES) as store:
        ops = [row["op"] for row in store.query("slowest_ops").to_dicts()]
        assert ops == ["slow", "fast", "sglang.generate"]
        (row,) = store.query("slowest_ops", step="2").to_dicts()
    assert (row["calls"], row["max_ms"]) == (1, 1.0)


def test_errors_go_by_op_and_kind() -> None:
    with store_of(**TABLES) as store:
        (row,) = store.query("errors_by_op").to_dicts()
    assert (row["op"], row["error_type"], row["newest_trace_id"]) == ("slow", "ValueError", "2-0")


def test_a_users_folder_adds_queries_and_wins(tmp_path: Path) -> None:
    (tmp_path / "reward_by_step.sql").write_text("-- Mine.\n-- params: least\nselect $least as x")
    query = find_query("reward_by_step", [tmp_path])
    assert (query.description, query.marks) == ("Mine.", {"least": ""})
    with store_of() as store:
        rows = store.query("reward_by_step", folders=[tmp_path], least=3).to_dicts()
    assert rows == [{"x": 3}]


def test_wrong_parameters_are_named(tmp_path: Path) -> None:
    (tmp_path / "mine.sql").write_text("-- Mine.\n-- params: least\nselect $least")
    with store_of() as store:
        with pytest.raises(QueryError, match=r"^query mine needs least=…: it takes least\b"):
            store.query("mine", folders=[tmp_path])
        with pytest.raises(QueryError, match=r"^unknown parameter 'leest'\. Did you mean least\?"):
            store.query("mine", folders=[tmp_path], leest=1)
        with pytest.raises(
            QueryError, match=r"^unknown query 'slowest_op'\. Did you mean slowest_ops\?"
        ):
            store.query("slowest_op")


def test_a_file_without_its_comment_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bare.sql").write_text("select 1")
    with pytest.raises(QueryError, match=r"/bare\.sql .*'-- params: "):
        load_queries([tmp_path])


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QueryError, match=rf"{tmp_path}/none: .*\.sql\b"):
        load_queries([tmp_path / "none"])


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "-- nothing",
        "selec 1",
        "select 1; select 2",
        "drop view runs",
        "create table t as select 1",
        "create temp table t as select 1",
        "insert into unsealed_runs select * from unsealed_runs",
        "with a as (insert into unsealed_runs values (1) returning *) select * from a",
        "update unsealed_runs set run_id = ''",
        "delete from processes",
        "with a as (delete from processes returning *) select * from a",
        "explain analyze update processes set worker = 'x'",
        "copy (select 1) to '{file}'",
        "export database '{folder}'",
        "attach '{file}' as other",
        "install httpfs",
        "load httpfs",
        "set threads = 1",
        "set enable_external_access = true",
        "reset allowed_paths",
        "pragma enable_profiling",
        "call pragma_version()",
        "explain analyze drop view runs",
        "explain analyze copy (select 1) to '{file}'",
        "explain (analyze) drop view runs",
        "explain /* analyze */ analyze drop view runs",
        "from query('drop view runs')",
    ],
)
def test_user_sql_cannot_write_or_change_settings(sql: str, full: Store, tmp_path: Path) -> None:
    text = sql.format(file=tmp_path / "out", folder=tmp_path)
    kept = "select view_name as name from duckdb_views() union all select table_name from "
    kept += "duckdb_tables() union all select distinct worker from processes order by 1"
    before = full.sql(kept).to_dicts()
    with pytest.raises(QueryError):
        full.sql(text)
    assert full.sql(kept).to_dicts() == before
    assert len(full.sql("from runs").to_dicts()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "source",
    [
        "read_text('{file}')",
        "read_blob('{file}')",
        "read_csv('{file}')",
        "read_json('{file}')",
        "read_parquet('{file}')",
        "parquet_metadata('{file}')",
        "sniff_csv('{file}')",
        "glob('{folder}/*')",
        "'{file}'",
        "query('from read_text(''{file}'')')",
        "read_csv('http://127.0.0.1:9/x.csv')",
        "duckdb_secrets()",
    ],
)
def test_user_sql_cannot_read_other_files(source: str, empty: Store, tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a,b\n1,2\n")
    text = source.format(file=secret, folder=tmp_path)
    with pytest.raises(QueryError):
        empty.sql(f"select * from {text}")


def test_user_sql_cannot_see_python_variables() -> None:
    import pyarrow as pa

    secret = pa.table({"a": [1]})
    with store_of() as store, pytest.raises(QueryError, match="secret"):
        store.sql("from secret")
    assert len(secret) == 1


@pytest.mark.parametrize(
    "sql",
    ["select 1", "from runs", "with a as (select 1) from a", "values (1)", "describe runs",
     "summarize runs", "show tables", "explain select 1", "explain analyze select 1", "table runs"],
)  # fmt: skip
def test_everything_that_only_reads_is_allowed(sql: str, full: Store) -> None:
    assert full.sql(sql).to_dicts()


def test_an_error_is_one_line_that_names_the_mistake() -> None:
    with store_of() as store, pytest.raises(QueryError) as raised:
        store.sql("select rewards from trajectories")
    assert "\n" not in str(raised.value)
    assert '"rewards"' in str(raised.value)


def test_parameters_are_given_by_name_or_by_place() -> None:
    with store_of() as store:
        assert store.sql("select $x as x", {"x": "'"}).to_dicts() == [{"x": "'"}]
        assert store.sql("select ? as x", [3]).to_dicts() == [{"x": 3}]
