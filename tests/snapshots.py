"""Stores made of rows, for what a recorder would take long to bring about."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from localtrace.read.store import Store
from localtrace.schema import TABLES, TableSchema
from localtrace.store.layout import StoreLayout
from localtrace.store.tables.damage import Damage
from localtrace.store.tables.snapshot import Snapshot, Unsealed

_COMMON = {
    "project": "default",
    "experiment": "default",
    "run_id": "run",
    "attempt": 0,
    "writer_id": "0" * 16,
    "writer_seq": 0,
}
_BY_TABLE: dict[str, dict[str, Any]] = {
    "trajectories": {"status": "ok", "validate": False, "start_ns": 0, "end_ns": 1},
    "spans": {"status": "ok", "op": "call", "seq": 0, "start_ns": 0, "end_ns": 1, "is_turn": False},
    "outcomes": {"time_ns": 0, "folded": False},
    "runs": {"event": "start", "time_ns": 0},
    "metrics": {},
}

Row = dict[str, Any]


class MadeRows(Unsealed):
    """Rows that are in no journal."""

    def __init__(self, tables: Mapping[str, pa.Table]) -> None:
        super().__init__()
        self._tables = tables

    def __reduce__(self) -> tuple[Any, ...]:
        return MadeRows, (self._tables,)

    def __getitem__(self, table: str) -> pa.Table:
        return self._tables[table]

    def calls_of(self, trace_ids: Collection[str]) -> pa.Table:
        return self._tables["spans"]

    def has_rows(self, table: TableSchema) -> bool:
        return self._tables[table.name].num_rows > 0

    @property
    def damage(self) -> Damage:
        return Damage()


def snapshot_of(**tables: list[Row]) -> Snapshot:
    """A snapshot whose rows are all unsealed; columns that a row lacks get a plain value."""
    made = {
        name: pa.Table.from_pylist(
            [{**_COMMON, **_BY_TABLE[name], **row} for row in tables.get(name, [])],
            schema=schema.arrow(),
        )
        for name, schema in TABLES.items()
    }
    return Snapshot({name: [] for name in TABLES}, MadeRows(made))


def store_of(**tables: list[Row]) -> Store:
    """A store that holds these rows."""
    return Store([StoreLayout(Path("nowhere"))], lambda: [[snapshot_of(**tables)]])
