"""Stores of several nodes, and how tests bring them about."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import localtrace
from localtrace.read.store import open_store
from localtrace.schema import TABLES
from localtrace.store.compacting.compact import compact
from localtrace.store.layout import open_layout
from localtrace.store.sealing.seal import seal
from localtrace.store.tables.snapshot import take_snapshot
from localtrace.testing import recording
from tests.crash.found import contents
from tests.crash.rollouts import roll_out

Contents = dict[str, list[str]]


async def record(count: int) -> None:
    """Trajectories with outcomes, and a metric."""
    for number in range(count):
        trace_id = await roll_out(number, turns=2)
        localtrace.outcome(trace_id, step=number % 3, advantage=[0.5, -0.5], fate="trained")
    localtrace.log_metrics({"reward/mean": 0.5}, step=1)


def node(store: Path, count: int = 2) -> Path:
    """A node's store after a process recorded there and ended, and everything was sealed."""
    with recording(store):
        asyncio.run(record(count))
    seal(open_layout(store))
    return store


def merge(store: Path) -> None:
    """Merge the files of every partition into one, and delete the old ones at once."""
    compact(open_layout(store), grace_hours=0)


def recorded(store: Path) -> Contents:
    """All rows by table, without the columns that compaction fills."""
    snapshot = take_snapshot(open_layout(store))
    found = {}
    for name, schema in TABLES.items():
        columns = [one for one in schema.file_arrow().names if not one.startswith("newest_")]
        found[name] = sorted(map(repr, snapshot.rows(name, columns)))
    return found


def newest(store: Path) -> list[dict[str, Any]]:
    """Return the newest outcomes of every trajectory, as readers see them."""
    with open_store(store) as opened:
        found = opened.sql("select trace_id, fate, reward from trajectories order by trace_id")
        return found.to_dicts()


def together(*stores: Path) -> Contents:
    """All rows of several stores."""
    found = [contents(store) for store in stores]
    return {table: sorted(row for one in found for row in one[table]) for table in TABLES}


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
