"""Pruning and compaction beside damaged files: what goes on, what stays, and what is said."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from localtrace.maintain.prune import INTENT_NAME
from localtrace.maintain.upkeep import Upkeep
from localtrace.schema import OUTCOMES, SPANS, TRAJECTORIES, TableSchema
from localtrace.store.compacting.compact import compact
from localtrace.store.layout import StoreLayout, create_layout, open_layout
from localtrace.store.sealing.seal import seal
from localtrace.store.tables.delta import committed_files, open_table
from localtrace.testing import recording
from tests.commands import run
from tests.crash.processes import wait_until
from tests.sampled import roll_out
from tests.unit.test_compaction import add, files
from tests.unit.test_prune import marked, spans
from tests.unit.test_upkeep import upkeep_findings

STEPS = (1, 2, 3)
Damage = Callable[[Path], object]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def zero_column(path: Path, name: str) -> None:
    """Damage the values of one column, which only whoever reads that column sees."""
    with pq.ParquetFile(path) as file:
        group = file.metadata.row_group(0)
        columns = [group.column(number) for number in range(group.num_columns)]
    (column,) = [column for column in columns if column.path_in_schema == name]
    start = column.dictionary_page_offset or column.data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps with two groups of one rollout each."""
    store = tmp_path_factory.mktemp("recorded") / "store"
    with recording(store, run_id="run"):
        for step in STEPS:
            for sample in (0, 1):
                roll_out(step, sample, reward=float(sample))
    seal(open_layout(store))
    return store


@pytest.fixture
def store(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "store"))


def place(store: Path, schema: TableSchema, folder: str = "") -> Path:
    layout = open_layout(store)
    (found,) = [
        file for file in committed_files(open_table(layout, schema)) if file.folder.endswith(folder)
    ]
    return found.place(layout, schema)


@pytest.mark.parametrize("damage", [truncate, zero, Path.unlink], ids=["cut", "zeroed", "missing"])
def test_a_pruning_does_all_partitions_but_that_of_a_damaged_file(
    store: Path, damage: Damage
) -> None:
    before, bad = spans(store), place(store, SPANS, "step=2")
    whole = bad.read_bytes()
    damage(bad)
    broken = bad.read_bytes() if bad.exists() else None
    done = run("prune", "-s", store, "step=1..3", "--yes")
    assert done.exit_code == 1
    assert str(bad) in done.stdout
    assert "restore it from a copy" in done.stdout
    assert "2 trajectories, a file of their partition is damaged" in done.stderr
    assert (bad.read_bytes() if bad.exists() else None) == broken
    assert len(marked(store)) == 4
    bad.write_bytes(whole)
    assert spans(store) == before - marked(store).keys()
    done = run("prune", "-s", store, "step=1..3", "--yes")
    assert (done.exit_code, len(marked(store)), spans(store)) == (0, 6, set())
    assert not (store / INTENT_NAME).exists()


def test_damage_met_on_the_way_leaves_its_file_and_the_rest_is_completed_later(
    store: Path,
) -> None:
    bad = place(store, SPANS, "step=2")
    whole = bad.read_bytes()
    zero_column(bad, "inputs")
    done = run("prune", "-s", store, "where=sample_index='0'", "--yes")
    assert done.exit_code == 1
    assert str(bad) in done.stdout
    assert (store / INTENT_NAME).exists()
    assert len(marked(store)) == 3
    assert len(spans(store)) == 4  # of step 2 both are still there
    bad.write_bytes(whole)
    done = run("prune", "-s", store, "where=sample_index='0'", "--yes")
    assert "completing it" in done.stderr
    assert done.exit_code == 0
    assert len(spans(store)) == 3
    assert not (store / INTENT_NAME).exists()


def test_no_call_goes_whose_trajectory_cannot_be_marked(store: Path) -> None:
    before, bad = spans(store), place(store, TRAJECTORIES)
    whole = bad.read_bytes()
    zero_column(bad, "host")
    done = run("prune", "-s", store, "step=1..3", "--yes")
    assert done.exit_code == 1
    assert str(bad) in done.stdout
    assert spans(store) == before
    bad.write_bytes(whole)
    assert run("prune", "-s", store, "step=3", "--yes").exit_code == 0
    assert (len(marked(store)), spans(store)) == (6, set())


def test_the_sealer_prunes_the_rest_and_doctor_names_the_file(store: Path) -> None:
    bad = place(store, SPANS, "step=2")
    whole = bad.read_bytes()
    truncate(bad)
    one = Upkeep(store, "1kB,keep=errors")
    wait_until(lambda: not one.keep(at_end=True))
    assert len(marked(store)) == 4
    texts = [finding["text"] for finding in upkeep_findings(store)]
    assert any("pruning" in text and bad.name in text for text in texts)
    bad.write_bytes(whole)
    assert run("prune", "-s", store, "step=1..3", "--yes").exit_code == 0  # as doctor advises
    assert upkeep_findings(store) == []


@pytest.mark.parametrize("damage", [truncate, zero, Path.unlink], ids=["cut", "zeroed", "missing"])
def test_a_compaction_merges_and_folds_all_but_damaged_files(
    tmp_path: Path, damage: Damage
) -> None:
    layout = create_layout(tmp_path / "store")
    for number in range(4):
        for schema in (SPANS, OUTCOMES, TRAJECTORIES):
            add(layout, number, schema)
    bad = [_place(layout, schema) for schema in (SPANS, OUTCOMES, TRAJECTORIES)]
    whole = [path.read_bytes() for path in bad]
    for path in bad:
        damage(path)
    done = run("compact", "-s", layout.root)
    assert done.exit_code == 1
    assert all(str(path) in done.stdout for path in bad)
    assert [len(files(layout, schema)) for schema in (SPANS, TRAJECTORIES)] == [2, 2]
    for path, data in zip(bad, whole, strict=True):
        path.write_bytes(data)
    assert compact(layout).problems == []
    assert [len(files(layout, schema)) for schema in (SPANS, TRAJECTORIES)] == [1, 1]
    for schema in (SPANS, OUTCOMES, TRAJECTORIES):
        assert sum(file.rows or 0 for file in files(layout, schema)) == 12


def _place(layout: StoreLayout, schema: TableSchema) -> Path:
    return files(layout, schema)[1].place(layout, schema)
