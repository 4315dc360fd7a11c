"""Decode every page of a bundle's tables in a child process with limits on memory and time.

A few kilobytes of Parquet can decompress to terabytes, and page headers can lie about it. A hostile
table may therefore break the child, never the caller. Only Linux enforces the limit on memory;
elsewhere only the limits on the decompressed size protect the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GROUP_MAX_BYTES = 2**30
"""Largest row group, uncompressed or decoded. Tables written by localtrace stay far below."""
DECODED_MIN_BYTES = 2**28
DECODED_MAX_TIMES = 2_000
"""A file may decode to `DECODED_MIN_BYTES` plus this many times its size."""
MEMORY_MAX_BYTES = 4 * 2**30
_BATCH_ROWS = 64
"""Rows decoded at a time of columns of texts or lists, where one value may be large."""
_NARROW_BATCH_ROWS = 2**16
_VALUE_BYTES = 4
"""Size of a token id or log-probability, the smallest value that lists hold."""
_DECODES = "decodes to more than any table that localtrace made"
_START_MAX_S = 60.0
_BYTES_PER_S_MIN = 2**20


@dataclass(frozen=True, slots=True)
class TableFile:
    """A Parquet file to read."""

    path: str
    table: str


@dataclass(frozen=True, slots=True)
class Pages:
    """The result of reading one file."""

    rows: int
    problem: str | None = None


def read_pages(files: Sequence[TableFile]) -> Iterator[Pages]:
    """Read every page of these files; yield for each its number of rows, or its problem."""
    left = list(files)
    while left:
        found, why = _read_in_child(left)
        yield from found
        left = left[len(found) :]
        if left and why is not None:
            yield Pages(0, why)
            left = left[1:]


def _read_in_child(files: Sequence[TableFile]) -> tuple[list[Pages], str | None]:
    """Return the child's results, and why it ended early if it did not reach the last file."""
    size_bytes = sum(Path(file.path).stat().st_size for file in files)
    child = [sys.executable, "-m", "localtrace.uploader.bundles.pages"]
    lines = "".join(json.dumps(asdict(file)) + "\n" for file in files)
    try:
        done = subprocess.run(
            child, input=lines.encode(), capture_output=True, check=False,
            timeout=_START_MAX_S + size_bytes / _BYTES_PER_S_MIN,
        )  # fmt: skip
        said, last = done.stdout, done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        why = f"cannot be read in {MEMORY_MAX_BYTES} bytes of memory ({last[:200]})"
    except subprocess.TimeoutExpired as late:
        said, why = late.stdout or b"", "takes too long to read"
    found = [Pages(**json.loads(line)) for line in said.split(b"\n")[:-1]]
    return found, None if len(found) == len(files) else why


# -- in the child -------------------------------------------------------------------------------


def main() -> None:
    """Run the child: read one `TableFile` as JSON per line of stdin, print its `Pages` as JSON."""
    _limit_memory()
    for line in sys.stdin:
        pages = read_file(TableFile(**json.loads(line)))
        sys.stdout.buffer.write(json.dumps(asdict(pages)).encode() + b"\n")
        sys.stdout.buffer.flush()


def read_file(file: TableFile) -> Pages:
    """Read every page of one file in this process.

    Raises:
        MemoryError: this process may be in any state now; a new one reads the next file.
    """
    import pyarrow as pa

    try:
        return Pages(_rows_of(file))
    except MemoryError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        said = str(error).partition("\n")[0][:500]
        return Pages(0, said if isinstance(error, _Refused) else f"cannot be read ({said})")


class _Refused(ValueError):
    """The file is not a table that localtrace could have written."""


def _limit_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX_BYTES, MEMORY_MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _rows_of(file: TableFile) -> int:
    import pyarrow.parquet as pq

    from localtrace.schema import TABLES

    path = Path(file.path)
    most_bytes = DECODED_MIN_BYTES + DECODED_MAX_TIMES * path.stat().st_size
    with pq.ParquetFile(path, pre_buffer=False) as parquet:
        if not parquet.schema_arrow.equals(TABLES[file.table].arrow()):
            raise _Refused(f"has other columns than the table {file.table}")
        for number in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(number)
            columns = [group.column(n) for n in range(group.num_columns)]
            size_bytes = sum(column.total_uncompressed_size for column in columns)
            if max(group.total_byte_size, size_bytes) > GROUP_MAX_BYTES:
                raise _Refused(f"has a row group of more than {GROUP_MAX_BYTES} bytes")
            if _VALUE_BYTES * sum(column.num_values for column in columns) > most_bytes:
                raise _Refused(_DECODES)
            most_bytes -= _decoded_bytes(parquet, number, min(most_bytes, GROUP_MAX_BYTES))
        return int(parquet.metadata.num_rows)


def _decoded_bytes(parquet: Any, number: int, most_bytes: int) -> int:
    """Decode a row group, column by column and a few rows at a time; return its size."""
    decoded = 0
    rows = parquet.metadata.row_group(number).num_rows
    for field in parquet.schema_arrow:
        seen = 0
        at_once = _NARROW_BATCH_ROWS if _is_narrow(field.type) else _BATCH_ROWS
        for batch in parquet.iter_batches(at_once, [number], [field.name], use_threads=False):
            seen += len(batch)
            decoded += batch.nbytes
            if decoded > most_bytes:
                raise _Refused(_DECODES)
        if seen != rows:
            raise _Refused(f"has {seen} values of {field.name} in a group of {rows} rows")
    return decoded


def _is_narrow(kind: Any) -> bool:
    try:
        return bool(kind.bit_width)
    except ValueError:
        return False


if __name__ == "__main__":
    main()
