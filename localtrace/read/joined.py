"""Stores without copies, read as one: DuckDB plans every part of a union for each query."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

import pyarrow as pa

from localtrace.schema import SPANS, TABLES, TableSchema
from localtrace.store.tables.snapshot import Copies, Snapshot, Unsealed


def joined(stores: Sequence[Copies]) -> Sequence[Copies]:
    """Return the stores of which there is one copy as one; copies and bundles stay apart."""
    lone = [copies[0] for copies in stores if len(copies) == 1 and copies[0].partitioned]
    files = {name: [path for store in lone for path in store.files[name]] for name in TABLES}
    receipts = tuple(chain.from_iterable(store.receipts for store in lone))
    whole = Snapshot(files, _AllUnsealed([store.pending for store in lone]), receipts)
    apart = [copies for copies in stores if len(copies) > 1 or not copies[0].partitioned]
    return [[whole], *apart] if len(lone) > 1 else stores


class _AllUnsealed(Unsealed):
    """The rows of journals of several stores."""

    def __init__(self, parts: Sequence[Unsealed]) -> None:
        super().__init__()
        self._of_each = [part for part in parts if any(map(part.has_rows, TABLES.values()))]

    def __getitem__(self, table: str) -> pa.Table:
        return pa.concat_tables([TABLES[table].no_rows(), *(part[table] for part in self._of_each)])

    def calls_of(self, trace_ids: Collection[str]) -> pa.Table:
        """Return the calls of some trajectories, perhaps with others."""
        return pa.concat_tables(
            [SPANS.no_rows(), *(part.calls_of(trace_ids) for part in self._of_each)]
        )

    def has_rows(self, table: TableSchema) -> bool:
        """Tell whether a table has rows, without reading calls."""
        return any(part.has_rows(table) for part in self._of_each)
