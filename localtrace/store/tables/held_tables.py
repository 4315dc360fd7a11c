"""Tables that a process opens again and again: it reads only what is new in their logs.

Opening a table costs what its checkpoint holds, and that grows with the files of a store.
"""

from __future__ import annotations

import contextlib
import os

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from localtrace.schema import TableSchema
from localtrace.store.layout import StoreLayout
from localtrace.store.tables.delta import open_table
from localtrace.store.tables.log import log_folder, refuse_strangers


class HeldTables:
    """The tables of one store, as this process saw them last."""

    def __init__(self, layout: StoreLayout) -> None:
        self._layout = layout
        self._held: dict[str, tuple[DeltaTable, os.stat_result]] = {}

    def newest(self, schema: TableSchema) -> DeltaTable | None:
        """Read the newest committed state of a table; None where nothing was committed.

        Raises:
            StoreError: the table's log is damaged.
        """
        table = self._renewed(schema) or open_table(self._layout, schema)
        self._held.pop(schema.name, None)
        if table is not None and (entry := self._entry(schema, table)):
            self._held[schema.name] = table, entry
        return table

    def forget(self) -> None:
        """Open every table anew the next time, as after a repair of its log."""
        self._held.clear()

    def _renewed(self, schema: TableSchema) -> DeltaTable | None:
        table, before = self._held.get(schema.name, (None, None))
        if table is None or before is None:
            return None
        refuse_strangers(self._layout, schema)
        entry = self._entry(schema, table)
        # The log may be another one by now, as of a new store in the place of a deleted one.
        if entry and os.path.samestat(entry, before) and entry.st_mtime_ns == before.st_mtime_ns:
            with contextlib.suppress(DeltaError, OSError):
                table.update_incremental()
                return table
        return None

    def _entry(self, schema: TableSchema, table: DeltaTable) -> os.stat_result | None:
        """Return what tells the newest log entry of a state from another of its name."""
        with contextlib.suppress(OSError):
            return os.lstat(log_folder(self._layout, schema) / f"{table.version():020}.json")
        return None
