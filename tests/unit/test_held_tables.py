"""Tables that a process holds: what it sees is what it would see by opening them anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from localtrace.errors import StoreError
from localtrace.schema import RUNS
from localtrace.store.layout import StoreLayout, create_layout
from localtrace.store.tables import delta, held_tables, log
from localtrace.store.tables.delta import commit, committed_files, committed_number, open_table
from localtrace.store.tables.held_tables import HeldTables
from localtrace.store.tables.log import heal_log, log_folder, trim_log
from localtrace.store.tables.parquet_files import write_files
from localtrace.store.tables.rows import Columns

WRITER = "0123456789abcdef"
State = tuple[int, set[str], int]


def add(layout: StoreLayout, number: int, tables: HeldTables | None = None) -> None:
    columns = Columns(RUNS)
    columns.add({"project": "p", "experiment": "e", "attempt": 0, "run_id": f"r{number}"})
    rows, _ = columns.table()
    held = tables.newest(RUNS) if tables else None
    commit(layout, RUNS, write_files(layout, RUNS, rows), {WRITER: number}, held)


def state(table: delta.DeltaTable | None) -> State:
    assert table is not None
    files = {file.path for file in committed_files(table)}
    return table.version(), files, committed_number(table, WRITER)


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    layout = create_layout(tmp_path / "store")
    for number in range(3):
        add(layout, number)
    return layout


def append(layout: StoreLayout) -> None:
    add(layout, 9)


def trim(layout: StoreLayout) -> None:
    for number in range(3, 12):
        add(layout, number)
    assert trim_log(layout, RUNS)


def tear(layout: StoreLayout) -> None:
    newest = max(log_folder(layout, RUNS).glob("*.json"))
    newest.write_bytes(newest.read_bytes()[:-40])
    assert heal_log(layout, RUNS)


def restore(layout: StoreLayout) -> None:
    """Put a copy of the log in its place, as it was one commit ago, and commit something else."""
    folder = log_folder(layout, RUNS)
    copy = shutil.copytree(folder, folder.with_name("copy"))
    newest = max(copy.glob("*.json"))
    for path in (newest, newest.with_suffix(".checkpoint.parquet"), copy / "_last_checkpoint"):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder)
    copy.rename(folder)
    add(layout, 7)


def leave(layout: StoreLayout) -> None:
    pass


@pytest.mark.parametrize("change", [leave, append, trim, tear, restore])
def test_a_held_table_is_what_opening_it_anew_gives(
    layout: StoreLayout, change: Callable[[StoreLayout], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "ENTRIES_KEPT", 1)
    monkeypatch.setattr(log, "ENTRIES_MAX", 1)
    tables = HeldTables(layout)
    before = state(tables.newest(RUNS))
    change(layout)
    now = state(tables.newest(RUNS))
    assert now == state(open_table(layout, RUNS))
    assert (now == before) == (change is leave)
    add(layout, 20, tables)
    assert state(tables.newest(RUNS)) == state(open_table(layout, RUNS))
    assert state(open_table(layout, RUNS))[1] > now[1]


def test_a_held_table_is_not_opened_again(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = HeldTables(layout)
    assert tables.newest(RUNS) is tables.newest(RUNS)
    monkeypatch.delattr(held_tables, "open_table")
    add(layout, 5, tables)
    assert state(tables.newest(RUNS))[2] == 5


def test_a_link_in_the_log_of_a_held_table_is_refused(layout: StoreLayout) -> None:
    tables = HeldTables(layout)
    tables.newest(RUNS)
    (log_folder(layout, RUNS) / f"{99:020}.json").symlink_to("/dev/zero")
    with pytest.raises(StoreError, match="is a link"):
        tables.newest(RUNS)


def test_a_table_that_is_gone_is_not_held(layout: StoreLayout) -> None:
    tables = HeldTables(layout)
    tables.newest(RUNS)
    shutil.rmtree(layout.table("runs"))
    assert tables.newest(RUNS) is None
