"""Repair of a table's log: entries and checkpoints that a crash left empty or torn."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from pathlib import Path

import pyarrow as pa

from localtrace.errors import StoreError
from localtrace.schema import TableSchema
from localtrace.store.files import is_file, read_file
from localtrace.store.layout import StoreLayout
from localtrace.store.tables.delta import ACTIONS_NAME
from localtrace.store.tables.log_files import (
    CHECKPOINT,
    CHECKPOINT_NOTE,
    ENTRY,
    log_folder,
    log_names,
)


def heal_log(layout: StoreLayout, schema: TableSchema) -> list[str]:
    """Move an empty or torn newest log entry or checkpoint to quarantine; return what was moved.

    A machine that crashed while committing can leave one. The journals of the entry are deleted
    only after it is on the disk, so they are still there and are sealed again. A link, a FIFO or
    the like stays: the file that it replaced may have been whole, so a person must look.
    """
    log = log_folder(layout, schema)
    moved = []
    while torn := torn_log_entry(layout, schema):
        moved.append(_put_aside(layout, schema, torn))
        # Without its entry, delta-rs reads a checkpoint of the same version, but commits no more.
        checkpoint = torn.with_suffix(".checkpoint.parquet")
        if is_file(checkpoint):
            moved += _put_checkpoint_aside(layout, schema, checkpoint)
    for name in log_names(layout, schema, CHECKPOINT)[-1:]:
        if is_file(log / name) and _is_torn(log / name):
            moved += _put_checkpoint_aside(layout, schema, log / name)
    return moved


def _put_checkpoint_aside(layout: StoreLayout, schema: TableSchema, checkpoint: Path) -> list[str]:
    """Move a checkpoint and the note that names it: a table is read without them too."""
    moved = [_put_aside(layout, schema, checkpoint)]
    with contextlib.suppress(FileNotFoundError):
        moved.append(_put_aside(layout, schema, checkpoint.with_name(CHECKPOINT_NOTE)))
    return moved


def _put_aside(layout: StoreLayout, schema: TableSchema, torn: Path) -> str:
    layout.quarantine.mkdir(exist_ok=True)
    target = layout.quarantine / f"{schema.name}-{torn.name}-{uuid.uuid4().hex[:8]}"
    os.replace(torn, target)
    return f"{schema.name}: torn log entry {torn.name} moved to {target}"


def _is_torn(checkpoint: Path) -> bool:
    import pyarrow.parquet as pq

    try:
        pq.ParquetFile(checkpoint).close()
    except pa.ArrowInvalid:
        return True
    return False


def torn_log_entry(layout: StoreLayout, schema: TableSchema) -> Path | None:
    """Return the newest log entry of a table if it is empty or torn, else None."""
    for name in log_names(layout, schema, ENTRY)[-1:]:
        newest = log_folder(layout, schema) / name
        return newest if is_file(newest) and not _is_whole(newest) else None
    return None


def _is_whole(entry: Path) -> bool:
    try:
        actions = [json.loads(line) for line in read_file(entry).splitlines()]
        # An entry torn between two lines can be told by their number alone.
        count = actions[0].get("commitInfo", {}).get(ACTIONS_NAME, len(actions))
        return int(count) == len(actions)
    except (StoreError, ArithmeticError, ValueError, TypeError, LookupError):
        return False
    except (AttributeError, RecursionError):
        return False
