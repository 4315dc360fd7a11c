"""Table files that cannot be read: found and named, so that work goes on with the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from localtrace.errors import StoreError
from localtrace.schema import TableSchema
from localtrace.store.compacting.merge import open_parquet
from localtrace.store.layout import StoreLayout
from localtrace.store.tables.delta import CommittedFile, committed_files, open_table

UNREADABLE = (StoreError, pa.ArrowException, OSError)
"""The errors of reading a file that is damaged or gone."""
REMEDY = "restore it from a copy of the store; localtrace verify lists all that is damaged"


def damaged_files(
    layout: StoreLayout,
    schema: TableSchema,
    files: Iterable[CommittedFile],
    columns: Sequence[str] | None = None,
) -> dict[CommittedFile, str]:
    """Read files; return those that are damaged or missing, with a message for each.

    Files that were replaced and deleted meanwhile are neither.

    Args:
        layout: the store.
        schema: the table of the files.
        files: files of its state.
        columns: those that are read; None: all.

    Raises:
        StoreError: the table cannot be opened.
    """
    found: dict[CommittedFile, str] = {}
    missing: list[CommittedFile] = []
    for file in files:
        try:
            problem = _problem(layout, schema, file, columns)
        except FileNotFoundError:
            missing.append(file)
            continue
        if problem is not None:
            found[file] = problem
    found |= dict.fromkeys(lost_files(layout, schema, missing), "it is missing")
    return {
        file: f"{file.place(layout, schema)}: {problem}; {REMEDY}"
        for file, problem in found.items()
    }


def lost_files(
    layout: StoreLayout, schema: TableSchema, missing: Sequence[CommittedFile]
) -> list[CommittedFile]:
    """Return those of missing files that were not replaced, and deleted, since they were listed.

    Raises:
        StoreError: the table cannot be opened.
    """
    if not missing:
        return []
    state = {file.path for file in committed_files(open_table(layout, schema))}
    return [file for file in missing if file.path in state]


def _problem(
    layout: StoreLayout, schema: TableSchema, file: CommittedFile, columns: Sequence[str] | None
) -> str | None:
    rows = 0
    try:
        with open_parquet(file.place(layout, schema)) as opened:
            held = set(opened.schema_arrow.names)  # an older format version lacks some
            read = None if columns is None else [name for name in columns if name in held]
            for number in range(opened.num_row_groups):
                rows += len(opened.read_row_group(number, read))
    except FileNotFoundError:
        raise
    except UNREADABLE as error:
        return " ".join(str(error).split())
    return None if file.rows in (None, rows) else f"it has {rows} rows instead of {file.rows}"
