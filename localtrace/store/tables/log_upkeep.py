"""Upkeep of a table's log.

A log stays short: a checkpoint holds the whole state, and entries well before it are deleted. What
is deleted was read back and is on the disk, so that a crash of the machine loses nothing. A reader
that is opening the table meanwhile opens it again (`delta.open_table`).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from localtrace.errors import StoreError
from localtrace.schema import TableSchema
from localtrace.store.files import sync
from localtrace.store.layout import StoreLayout
from localtrace.store.tables.delta import committed_files
from localtrace.store.tables.held_tables import HeldTables
from localtrace.store.tables.log_files import (
    CHECKPOINT,
    CHECKPOINT_NOTE,
    ENTRY,
    log_folder,
    log_names,
    sync_log,
)

ENTRIES_MAX = 100
"""Log entries of a table above which a log is trimmed."""
ENTRIES_KEPT = 50
"""Entries before the checkpoint that stay, for readers that opened the table before."""
_CHECKPOINTS_KEPT = 2
_CHECKPOINT_EVERY = 4
"""Entries since a checkpoint that make it worth a new one: whoever opens the table reads them."""


def trim_log(
    layout: StoreLayout,
    schema: TableSchema,
    entries_max: int = ENTRIES_MAX,
    tables: HeldTables | None = None,
) -> int:
    """Write a checkpoint where there are many entries since the last, and trim a long log.

    Args:
        layout: the store.
        schema: the table.
        entries_max: of a log with fewer entries nothing is deleted.
        tables: tables that this process opened before.

    Returns:
        How many files were deleted.

    Raises:
        StoreError: the table cannot be opened, or the checkpoint is not what the table holds.
        OSError: a file cannot be written or deleted.
    """
    log = log_folder(layout, schema)
    entries, checkpoints = (log_names(layout, schema, kind) for kind in (ENTRY, CHECKPOINT))
    is_long = len(entries) > entries_max
    since = _newest(entries) - _newest(checkpoints)
    if not is_long and since < _CHECKPOINT_EVERY:
        return 0
    table = (tables or HeldTables(layout)).newest(schema)
    if table is None:
        return 0
    try:
        version = _write_checkpoint(layout, schema, table)
    except StoreError:
        if log_names(layout, schema, ENTRY)[:1] == entries[:1]:
            raise
        return 0  # another compaction trimmed the log meanwhile
    if not is_long:
        return 0
    checkpoints = log_names(layout, schema, CHECKPOINT)
    oldest = f"{max(version - ENTRIES_KEPT, 0):020}"
    kept = [name for name in checkpoints if _newest([name]) <= version][-_CHECKPOINTS_KEPT:]
    gone = [name for name in entries + checkpoints if name < oldest and name not in kept]
    # Oldest first: what a crash leaves is a log without a gap.
    for name in sorted(gone):
        (log / name).unlink(missing_ok=True)
    return len(gone)


def _newest(names: Sequence[str]) -> int:
    return int(names[-1].partition(".")[0]) if names else 0


def _write_checkpoint(layout: StoreLayout, schema: TableSchema, table: DeltaTable) -> int:
    """Write the checkpoint of a state, read it back and sync it; return its version."""
    version, files = table.version(), {file.path for file in committed_files(table)}
    path = log_folder(layout, schema) / f"{version:020}.checkpoint.parquet"
    try:
        table.create_checkpoint()
    except DeltaError as error:
        raise StoreError(
            f"table {schema.name} gets no checkpoint ({error}): nothing was deleted; run "
            "localtrace compact again"
        ) from error
    for file in (path, path.with_name(CHECKPOINT_NOTE)):
        sync(file)
    sync_log(layout, schema)
    with pq.ParquetFile(path) as file:
        added = pc.struct_field(file.read(["add.path"])["add"], "path")
    if pc.count(added).as_py() != len(files):
        raise StoreError(
            f"{path} does not hold the {len(files)} files of table {schema.name}: nothing was "
            "deleted; run localtrace verify"
        )
    return version
