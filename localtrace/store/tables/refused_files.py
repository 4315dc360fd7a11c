"""Files whose commit was refused, which would take space until somebody puts them aside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from localtrace.errors import StoreError
from localtrace.schema import TableSchema
from localtrace.store.layout import StoreLayout
from localtrace.store.tables.delta import committed_files, open_table
from localtrace.store.tables.parquet_files import WrittenFile


def is_none_committed(
    layout: StoreLayout, schema: TableSchema, files: Sequence[WrittenFile]
) -> bool:
    """Tell whether it is certain that a table's state has none of some files."""
    try:
        state = {file.path for file in committed_files(open_table(layout, schema))}
    except StoreError:
        return False
    return state.isdisjoint(file.path for file in files)


@contextlib.contextmanager
def removed_if_refused(
    layout: StoreLayout, schema: TableSchema, files: Sequence[WrittenFile]
) -> Iterator[None]:
    """Remove files where their commit fails, unless it was done in spite of the error."""
    try:
        yield
    except Exception:
        if is_none_committed(layout, schema, files):
            for file in files:
                (layout.table(schema.name) / file.path).unlink(missing_ok=True)
        raise
