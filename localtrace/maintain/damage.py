"""Damaged files, while it is chosen what to prune: their partitions are left alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from localtrace.read.query_limits import Limits
from localtrace.read.store import Store
from localtrace.schema import OUTCOMES, SPANS, TRAJECTORIES
from localtrace.store.layout import StoreLayout
from localtrace.store.tables.damaged_files import damaged_files
from localtrace.store.tables.delta import committed_files, open_table
from localtrace.store.tables.parquet_files import partition_values
from localtrace.store.tables.snapshot import Snapshot, take_snapshot

_READ = {
    TRAJECTORIES: None,
    OUTCOMES: None,
    SPANS: ("trace_id", "status", "is_turn", "finish_reason", "writer_seq", "writer_id"),
}
"""The columns that the choice looks at, by table; None: all."""
_KEYS = ("project", "experiment", "step")


@dataclass(slots=True)
class Damage:
    """Files that the choice cannot read."""

    paths: dict[str, dict[str, str | None]] = field(default_factory=dict)
    """The partition of each file, by its path."""
    problems: list[str] = field(default_factory=list)
    """Each file, and what to do about it."""

    @classmethod
    def find(cls, layout: StoreLayout) -> Damage:
        """Read all files of the tables that the choice looks at.

        Raises:
            StoreError: a table cannot be opened.
        """
        damage = cls()
        for schema, columns in _READ.items():
            files = committed_files(open_table(layout, schema))
            for file, problem in damaged_files(layout, schema, files, columns).items():
                path = str(file.place(layout, schema))
                damage.paths[path] = partition_values(file.folder)
                damage.problems.append(problem)
        return damage

    def store_without(self, layout: StoreLayout, limits: Limits) -> Store:
        """Open the store without these files; it must be closed."""

        def look() -> list[list[Snapshot]]:
            snapshot = take_snapshot(layout)
            files = {
                name: [path for path in paths if path not in self.paths]
                for name, paths in snapshot.files.items()
            }
            return [[replace(snapshot, files=files)]]

        return Store([layout], look, limits)

    def touches(self, trajectory: Mapping[str, Any]) -> bool:
        """Tell whether a damaged file may hold a part of a trajectory, or of its group."""
        of = {name: None if trajectory[name] is None else str(trajectory[name]) for name in _KEYS}
        return any(
            all(of[name] == partition[name] for name in _KEYS if name in partition)
            for partition in self.paths.values()
        )
