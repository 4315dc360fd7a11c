"""A DuckDB connection over one snapshot: sealed files and journals as the views of `views.sql`.

The connection cannot write, reads no file outside its snapshot, loads no extension and keeps its
settings locked. This module knows nothing of filters, named queries or records.
"""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from localtrace.errors import StoreError
from localtrace.schema import TABLES, UPLOADS, TableSchema

if TYPE_CHECKING:
    import duckdb

    from localtrace.store.snapshot import Snapshot

_PARTITION_TYPES = {"string": "VARCHAR", "int64": "BIGINT", "bool": "BOOLEAN"}
_VERSION = re.compile(r"v\d+-")
_SPILL_MAX_BYTES = 16 * 2**30
"""The disk may be one that training needs."""
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
}


def connect(snapshot: Snapshot, memory_max_bytes: int) -> duckdb.DuckDBPyConnection:
    """Open an in-memory database with the views over a snapshot, and lock it.

    Args:
        snapshot: what to show.
        memory_max_bytes: what queries may hold in memory; more goes to a temporary folder.

    Raises:
        StoreError: a folder above the store is named like a partition, which DuckDB would take
            for one.
    """
    import duckdb

    connection = duckdb.connect(":memory:", config=_CONFIG)
    connection.execute("create schema stored")
    for table in TABLES.values():
        connection.register(f"unsealed_{table.name}", snapshot.pending[table.name])
        files = snapshot.files[table.name]
        if snapshot.partitioned:
            _refuse_misleading_path(table, files)
        source = _union(table, files, snapshot.partitioned)
        connection.execute(f"create view stored.{table.name} as {source}")
    connection.register("unsealed_uploads", UPLOADS.arrow().empty_table())
    uploads = _union(UPLOADS, snapshot.receipts)
    connection.execute(f"create view stored.uploads as {uploads}")
    connection.execute(Path(__file__).with_name("views.sql").read_text("utf-8"))
    _lock(connection, snapshot, memory_max_bytes)
    return connection


def _union(table: TableSchema, files: Sequence[str], partitioned: bool = True) -> str:
    """Sealed and unsealed rows; columns that files of an older format version lack are null."""
    columns = ", ".join(f'"{name}"' for name in table.column_names)
    parts = [f"select {columns} from unsealed_{table.name}"]
    # DuckDB takes the columns of the first file for those of all, so each version is read apart.
    parts += [f"select * from {_sealed(table, same, partitioned)}" for same in _by_version(files)]
    return f"select {columns} from ({' union all by name '.join(parts)})"


def _by_version(files: Sequence[str]) -> list[list[str]]:
    """Files by the format version that their names begin with, if they do."""
    versions: dict[str | None, list[str]] = {}
    for path in files:
        version = _VERSION.match(os.path.basename(path))
        versions.setdefault(version and version[0], []).append(path)
    return list(versions.values())


def _sealed(table: TableSchema, files: Sequence[str], partitioned: bool) -> str:
    types = ", ".join(
        f"{column.name}: {_PARTITION_TYPES[column.type]}"
        for column in table.columns
        if column.name in table.partitions
    )
    hive = (
        f"hive_partitioning = true, hive_types = {{{types}}}"
        if types and partitioned
        else ("hive_partitioning = false")
    )
    return f"read_parquet({_texts(files)}, {hive})"


def _refuse_misleading_path(table: TableSchema, files: list[str]) -> None:
    # DuckDB takes every `name=value` folder of a path for a partition, the first one winning.
    if not files:
        return
    above = files[0].partition(f"/tables/{table.name}/")[0]
    for folder in Path(above).parts:
        name, equals, _ = folder.partition("=")
        if equals and name.lower() in table.column_names:
            raise StoreError(
                f"the store lies below a folder named {folder!r}, which cannot be told from a "
                f"partition: move the store, or rename that folder"
            )


def _lock(connection: duckdb.DuckDBPyConnection, snapshot: Snapshot, memory_max_bytes: int) -> None:
    # What does not fit in memory goes to a folder that DuckDB makes only then, and removes.
    spill = Path(tempfile.gettempdir()) / f"localtrace-{uuid.uuid4().hex}"
    files = [path for paths in (*snapshot.files.values(), snapshot.receipts) for path in paths]
    connection.execute(f"set temp_directory = {_text(str(spill))}")
    connection.execute(f"set max_temp_directory_size = '{_SPILL_MAX_BYTES}B'")
    connection.execute(f"set memory_limit = '{memory_max_bytes}B'")
    connection.execute("set enable_progress_bar = true")  # for query_progress()
    connection.execute("set enable_progress_bar_print = false")
    connection.execute("set TimeZone = 'UTC'")
    connection.execute(f"set allowed_paths = {_texts(files)}")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")


def _texts(values: Sequence[str]) -> str:
    return f"[{', '.join(map(_text, values))}]"


def _text(value: str) -> str:
    escaped = value.replace("'", "''")
    return f"'{escaped}'"
