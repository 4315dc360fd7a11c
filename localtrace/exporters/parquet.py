"""One Parquet file of trajectories, turns, calls or outcomes, with whole prompts.

The rows are those of `read/flat_rows.py`.
"""

from __future__ import annotations

from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from localtrace.read.flat_rows import flat_rows, flat_schema
from localtrace.types import Trajectory

_GROUP_MAX_BYTES = 32 * 2**20
_GROUP_MAX_ROWS = 4096


class Rows:
    """A writer of rows, with one row group in memory at a time.

    Args:
        kind: what a row is, one of KINDS.
    """

    def __init__(self, file: BinaryIO, kind: str) -> None:
        self._kind = kind
        self._writer = pq.ParquetWriter(file, flat_schema(kind), compression="zstd")
        self._batches: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = 0

    def add(self, trajectory: Trajectory) -> None:
        """Write the rows of a trajectory, all of them or none."""
        for batch in list(flat_rows(self._kind, trajectory)):
            self._batches.append(batch)
            self._waiting_rows += batch.num_rows
            self._waiting_bytes += batch.nbytes
            if self._waiting_rows >= _GROUP_MAX_ROWS or self._waiting_bytes >= _GROUP_MAX_BYTES:
                self._flush()

    def close(self) -> None:
        """Write what is left, and the footer."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._batches:
            self._writer.write_table(pa.Table.from_batches(self._batches))
        self._batches, self._waiting_rows, self._waiting_bytes = [], 0, 0
