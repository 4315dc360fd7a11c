"""The tables are read without localtrace, and everything but the upload works offline."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable

from localtrace.schema import TABLES
from tests.commands import rows, run
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
ROWS = {
    # A rollout of each step fails before it has outcomes, after a call of the tool.
    "trajectories": 3 * 8, "spans": 3 * (8 * 3 + 1), "outcomes": 3 * 7, "metrics": 3, "runs": 2,
}  # fmt: skip
COMMANDS = """
from click.testing import CliRunner
from localtrace.cli import main
for line in ("seal", "verify", "runs", "ls", "stats", "files", "query reward_by_step"):
    done = CliRunner().invoke(main, [*line.split(), "-s", sys.argv[1]])
    print(done.exit_code if done.stdout else done.stderr)
"""


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("sealed") / "store"
    subprocess.run([sys.executable, "-c", RECORD, str(store)], check=True)
    assert run("seal", "-s", store).exit_code == 0
    return store


@pytest.mark.parametrize("table", TABLES)
def test_every_reader_counts_the_same_rows(sealed: Path, table: str) -> None:
    files = run("files", table, "-s", sealed).stdout.split("\n")[:-1]
    plain = duckdb.sql("select count(*) from read_parquet($files)", params={"files": files})
    assert plain.fetchall() == [(ROWS[table],)]
    assert len(DeltaTable(sealed / "tables" / table).to_pyarrow_table()) == ROWS[table]
    if table != "runs":  # the view has one row per attempt
        view = table if table in ("spans", "metrics") else f"all_{table}"
        assert rows("sql", f"select count(*) as n from {view}", "-s", sealed) == [
            {"n": ROWS[table]}
        ]


def test_recording_sealing_and_querying_work_without_a_network(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--net", "true"], check=False).returncode:
        unavailable("network namespaces cannot be made here")
    python = [unshare, "--net", sys.executable]
    done = subprocess.run(
        [*python, "-c", RECORD + COMMANDS, str(tmp_path / "store")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()) == (0, ["0"] * 7), done.stderr
