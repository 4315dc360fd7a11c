"""Commands as programs: what they load, and how they end."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import localtrace
from localtrace.store.layout import open_layout
from localtrace.store.tokenizers import keep_tokenizer
from tests.commands import answer, record, run
from tests.unit.test_tokenizers import make_tokenizer


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quick")
    record(folder / "store", [{"answers": [answer("first", [5, 6], [-0.5, -0.25])]}])
    words = [f"w{number}" for number in range(8)]
    keep_tokenizer(open_layout(folder / "store"), make_tokenizer(folder, words), "run")
    run("seal", "-s", folder / "store")
    return folder / "store"


def program(*arguments: object, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, "-m", "localtrace", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command", [["ls"], ["runs"], ["stats"], ["group", "step=3"], ["show", "3/17/0"]]
)
def test_reading_loads_neither_the_recording_side_nor_pandas(
    store: Path, command: list[str]
) -> None:
    done = program(*command, "-s", store, python=("-X", "importtime"))
    assert done.returncode == 0
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "pyarrow.lib" in loaded
    assert loaded.isdisjoint({"pandas", "localtrace.record.recorder"})


@pytest.mark.parametrize(
    "command",
    [["ls"], ["show", "3/17/0"], ["sql", "select output_ids, output_logprobs from turns"],
     ["seal"]],
)  # fmt: skip
def test_journals_are_read_and_sealed_without_pandas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    turns = {"answers": [answer("first", [5, 6], [-0.1, -0.25])]}
    record(tmp_path / "store", [turns, {**turns, "step": 4, "reward": 0.5}])
    note = tmp_path / "pandas was loaded"
    (tmp_path / "pandas.py").write_text(f"open({str(note)!r}, 'w').close()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = program(*command, "-s", tmp_path / "store")
    assert (done.returncode, note.exists()) == (0, False), done.stderr


def test_pieces_of_tokens_are_shown(store: Path) -> None:
    done = program("show", "-s", store, "3/17/0", "--tokens", "--format", "json")
    tokens = [(row["piece"], row["generated"]) for row in json.loads(done.stdout)]
    assert tokens == [(" w5", True), (" w6", True)]


def test_parquet_is_written_as_bytes(store: Path) -> None:
    command = [sys.executable, "-m", "localtrace", "ls", "-s", store, "--format", "parquet"]
    done = subprocess.run(command, check=True, capture_output=True)
    table = pq.read_table(io.BytesIO(done.stdout))
    assert table.select(["step", "answer"]).to_pylist() == [{"step": 3, "answer": "w5 w6"}]
    assert str(table.schema.field("step").type) == "int64"


def test_arrays_come_back_as_arrays(tmp_path: Path) -> None:
    localtrace.init(tmp_path, project="p", experiment="e", min_free_bytes=0, seal=False)
    with localtrace.trajectory(step=1, sample_index=2, rollout_n=3):
        localtrace.op(len)(np.arange(3, dtype=np.float32))
    localtrace.close()
    done = program("show", "-s", tmp_path, "1/2/3")
    assert done.stdout == run("show", "-s", tmp_path, "1/2/3").stdout
    assert "ndarray" in done.stdout


def test_results_messages_and_exit_codes_get_out(store: Path) -> None:
    many = program("sql", "-s", store, "select range from range(30000)", "--format", "csv")
    assert many.returncode == 0
    assert many.stdout.splitlines()[-1] == "29999"
    none = program("query", "-s", store, "reward_by_step", "run=nobody")
    assert none.returncode == 0
    assert "no run matches nobody" in none.stderr
    wrong = program("ls", "-s", store, "sort=1")
    assert wrong.returncode == 2
    assert "unknown filter 'sort'" in wrong.stderr
