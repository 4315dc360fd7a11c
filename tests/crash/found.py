"""The content of a store after a crash: sealed rows and rows of journals, compared as wholes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from localtrace.maintain.verify import verify
from localtrace.schema import TABLES
from localtrace.store.layout import open_layout
from localtrace.store.sealing.seal import SealReport, seal
from localtrace.store.tables.snapshot import take_snapshot

Row = dict[str, Any]


def rows(store: Path, table: str) -> list[Row]:
    """Every row of a table, sealed or not, without the columns that stand in paths."""
    return take_snapshot(open_layout(store)).rows(table, TABLES[table].file_arrow().names)


def contents(store: Path) -> dict[str, list[str]]:
    """Everything that a store holds, by table, in an order that does not depend on files."""
    snapshot = take_snapshot(open_layout(store))
    return {
        name: sorted(map(repr, snapshot.rows(name, schema.file_arrow().names)))
        for name, schema in TABLES.items()
    }


def statuses(store: Path) -> dict[str, str]:
    """Status by trace id; a trajectory that has two rows fails the test."""
    found = rows(store, "trajectories")
    assert repeated(row["trace_id"] for row in found) == []
    return {row["trace_id"]: row["status"] for row in found}


def calls(store: Path) -> dict[str, list[str]]:
    """Names of the calls by trace id, in the order in which they began."""
    found: dict[str, list[str]] = {}
    for row in sorted(rows(store, "spans"), key=lambda row: row["seq"]):
        found.setdefault(row["trace_id"], []).append(row["op"])
    return found


def repeated(ids: Any) -> list[Any]:
    """Return the rows that are there more than once."""
    return [one for one, count in Counter(ids).items() if count > 1]


def times_said(caplog: pytest.LogCaptureFixture, reason: str) -> int:
    """Count the reasons of losses in the log, without the summary at the end."""
    return sum(f"({reason})" in record.getMessage() for record in caplog.records)


def seal_all(store: Path) -> SealReport:
    """Seal what is ready; the store must then be in order."""
    report = seal(open_layout(store))
    assert verify(open_layout(store)).problems == []
    return report


def sealed_contents(store: Path) -> dict[str, list[str]]:
    """Seal everything, and read it from the tables alone."""
    seal_all(store)
    snapshot = take_snapshot(open_layout(store))
    assert snapshot.pending.journals == {}
    return contents(store)


def dropped(store: Path) -> dict[str, str]:
    """Reason by trace id of the trajectories that were dropped."""
    found = rows(store, "trajectories")
    return {row["trace_id"]: row["error"] for row in found if row["status"] == "dropped"}
