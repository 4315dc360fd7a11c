"""The tables are read without localtrace, and everything but the upload works offline."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable

from localtrace.schema import TABLES
from tests.environment import unavailable

RECORD = """
import asyncio, sys
import localtrace

@localtrace.op
async def generate(prompt_ids, sampling_params):
    return {"output_ids": [4, 5], "output_logprobs": [-0.5, -0.25], "finish_reason": "stop"}

@localtrace.op
def tool(expression):
    return 1 / expression

async def roll_out(step, n):
    with localtrace.trajectory(step=step, sample_index=n // 4, rollout_n=n % 4) as t:
        for turn in range(3):
            await generate([1, 2, 3] * (turn + 1), {"temperature": 1.0})
        t.set(reward=n / 10)
        if n == 3:
            tool(0)
    return t.trace_id

localtrace.init(sys.argv[1], project="a project", experiment="50% = half/ü", min_free_bytes=0,
                seal=False)
for step in (1, 2, None):
    for n in range(8):
        try:
            trace_id = asyncio.run(roll_out(step, n))
        except ZeroDivisionError:
            continue
        localtrace.outcome(trace_id, step=step, advantage=0.5)
    localtrace.log_metrics({"reward/mean": 0.4}, step=step)
localtrace.close()
"""


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("sealed") / "store"
    subprocess.run([sys.executable, "-c", RECORD, str(store)], check=True)
    _localtrace(store, "seal")
    return store


def _localtrace(store: Path, command: str, *arguments: str) -> str:
    line = [sys.executable, "-m", "localtrace", command, "-s", str(store), *arguments]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("table", TABLES)
def test_every_reader_counts_the_same_rows(sealed: Path, table: str) -> None:
    view = table if table in ("spans", "metrics") else f"all_{table}"
    if table == "runs":
        ours = 2  # a start and an end; the view has one row per attempt
    else:
        (row,) = json.loads(
            _localtrace(sealed, "sql", f"select count(*) as n from {view}", "--format", "json")
        )
        ours = row["n"]
    files = _localtrace(sealed, "files", table).split("\n")[:-1]
    plain = duckdb.sql("select count(*) from read_parquet($files)", params={"files": files})
    assert plain.fetchall() == [(ours,)]
    assert len(DeltaTable(sealed / "tables" / table).to_pyarrow_table()) == ours
    assert ours > 0


@pytest.mark.parametrize("table", TABLES)
def test_tables_ask_for_no_reader_feature(sealed: Path, table: str) -> None:
    protocol = DeltaTable(sealed / "tables" / table).protocol()
    assert (protocol.min_reader_version, protocol.reader_features) == (1, None)


def test_names_and_steps_are_read_back_from_the_partitions(sealed: Path) -> None:
    import polars

    spans = polars.read_delta(str(sealed / "tables" / "spans"))
    assert set(spans["project"]) == {"a project"}
    assert set(spans["experiment"]) == {"50% = half/ü"}
    assert set(spans["step"]) == {1, 2, None}


def test_recording_sealing_and_querying_work_without_a_network(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--net", "true"], check=False).returncode:
        unavailable("network namespaces cannot be made here")
    store = tmp_path / "store"
    python = [unshare, "--net", sys.executable]
    subprocess.run([*python, "-c", RECORD, str(store)], check=True)
    for command in ("seal", "verify", "runs", "ls", "stats", "files", "query"):
        arguments = ["reward_by_step"] if command == "query" else []
        line = [*python, "-m", "localtrace", command, "-s", str(store), *arguments]
        assert subprocess.run(line, check=True, capture_output=True).stdout
