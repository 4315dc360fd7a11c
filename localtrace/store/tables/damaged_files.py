"""Table files that are damaged or missing: named, so that work goes on with the others.

What is damaged in a store, and what is done about it:

- A table file that cannot be read stays as it is. Every command passes over it, names it and ends
  with exit code 1; a person restores it.
- A torn log entry goes to quarantine (`log.heal_log`) when anything is written next, or by
  `recover`. Its journals are still there.
- A file of an unfinished commit takes space only. `verify` names it, `recover` puts it aside.
- A damaged journal is sealed as far as it can be read, and kept in quarantine (`sealing.seal`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from localtrace.errors import StoreError
from localtrace.schema import TableSchema
from localtrace.store.files import open_file
from localtrace.store.layout import StoreLayout
from localtrace.store.tables.delta import CommittedFile, committed_files, open_table

if TYPE_CHECKING:
    import pyarrow.parquet as pq

UNREADABLE = (StoreError, pa.ArrowException, OSError)
"""The errors of reading a file that is damaged or gone."""
_REMEDY = "restore it from a copy of the store; localtrace verify lists all that is damaged"


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file of a table.

    Raises:
        OSError: it is gone.
        StoreFormatError: something else than a file is there.
        ArrowInvalid: it is not a Parquet file.
    """
    import pyarrow.parquet as pq

    os.close(open_file(path))  # raises for a pipe, for which opening would wait
    return pq.ParquetFile(path)


def damaged_files(
    layout: StoreLayout,
    schema: TableSchema,
    files: Iterable[CommittedFile],
    columns: Sequence[str] | None = None,
    look: Callable[[pa.Table], object] | None = None,
) -> dict[CommittedFile, str]:
    """Read files; return those that are damaged or missing, with a message for each.

    Files that were replaced and deleted meanwhile are neither.

    Args:
        layout: the store.
        schema: the table of the files.
        files: files of its state.
        columns: those that are read; None: all.
        look: called with the rows of each row group.

    Raises:
        StoreError: the table cannot be opened.
    """
    problems: dict[CommittedFile, str] = {}
    missing: list[CommittedFile] = []
    for file in files:
        rows = 0
        try:
            with open_parquet(file.place(layout, schema)) as opened:
                for number in range(opened.num_row_groups):
                    group = opened.read_row_group(number, columns)
                    rows += len(group)
                    if look is not None:
                        look(group)
            if file.rows not in (None, rows):
                problems[file] = f"it has {rows} rows instead of {file.rows}"
        except FileNotFoundError:
            missing.append(file)
        except UNREADABLE as error:
            problems[file] = " ".join(str(error).split())
    if missing:
        state = {file.path for file in committed_files(open_table(layout, schema))}
        problems |= {file: "it is missing" for file in missing if file.path in state}
    return {
        file: f"{file.place(layout, schema)}: {problem}; {_REMEDY}"
        for file, problem in problems.items()
    }


def blamed_files(
    layout: StoreLayout,
    error: Exception,
    *suspects: tuple[TableSchema, Iterable[CommittedFile]],
) -> dict[CommittedFile, str]:
    """Return the damaged ones of the files whose reading failed, with a message for each.

    There are none where another process replaced one and deleted it meanwhile.

    Raises:
        OSError: the error has another cause, such as a full disk.
    """
    problems: dict[CommittedFile, str] = {}
    for schema, files in suspects:
        problems |= damaged_files(layout, schema, files)
    if problems or isinstance(error, FileNotFoundError):
        return problems
    if isinstance(error, OSError):
        raise error
    raise StoreError(f"{layout.root}: {error}: run localtrace verify") from error
