"""The files of a table's log: their names, and syncing them."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from localtrace.schema import TableSchema
from localtrace.store.files import is_file, sync
from localtrace.store.layout import LOG, StoreLayout

CHECKPOINT_NOTE = "_last_checkpoint"
ENTRY = re.compile(r"\d{20}\.json")
CHECKPOINT = re.compile(r"\d{20}\.checkpoint\.parquet")
_ANY = re.compile(".*")
_NEWEST = 8


def log_folder(layout: StoreLayout, schema: TableSchema) -> Path:
    return layout.table(schema.name) / LOG


def log_names(layout: StoreLayout, schema: TableSchema, kind: re.Pattern[str] = _ANY) -> list[str]:
    """Return the names of a log's files of one kind, the oldest first."""
    # Every seal lists logs several times: texts are sorted ten times as fast as paths.
    with contextlib.suppress(FileNotFoundError):
        return sorted(filter(kind.fullmatch, os.listdir(log_folder(layout, schema))))
    return []


def sync_log(layout: StoreLayout, schema: TableSchema) -> None:
    """Sync a table's newest log entries, which delta-rs does not do."""
    log = log_folder(layout, schema)
    for name in log_names(layout, schema)[-_NEWEST:]:
        with contextlib.suppress(FileNotFoundError):  # another node's draft
            if is_file(log / name):
                sync(log / name)
    for folder in (log, log.parent, log.parent.parent):
        sync(folder)
