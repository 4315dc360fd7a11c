"""Write the payload of one bag in bounded memory: tables, texts and tokenizers."""

from __future__ import annotations

import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from localtrace.schema import FORMAT_VERSION, TABLES, TableSchema
from localtrace.store.bundle import TEXTS_FILE, TRACE_IDS_FILE
from localtrace.store.files import sync
from localtrace.store.journal.disk import size_of
from localtrace.store.layout import META_NAME, StoreLayout, meta_text, read_meta
from localtrace.store.tables.parquet_files import parquet_writer, row_groups
from localtrace.store.tokenizers import FILE_NAME, pointer_in_bundle, tokenizer_file
from localtrace.uploader.bundles.manifest import sha256_of
from localtrace.uploader.bundles.rows import Batch, open_texts

_FILE_BYTES = 256 * 2**20


class Payload:
    """The files of one bag's folder `data` while they are written."""

    def __init__(self, folder: Path, of_runs: Mapping[str, pa.Table]) -> None:
        """Open the files.

        Args:
            of_runs: rows about the runs by table; every part holds all of them.
        """
        self.folder = folder
        self.trace_ids: list[str] = []
        self.redactions: Counter[str] = Counter()
        self.unsearched: Counter[str] = Counter()
        self.counts = dict.fromkeys(TABLES, 0)
        folder.mkdir(parents=True, exist_ok=True)
        self._tables = {name: _TableFiles(folder, schema) for name, schema in TABLES.items()}
        self._texts_file = (folder / TEXTS_FILE).open("wb")
        self._texts = open_texts(self._texts_file)
        self._raw_bytes, self._ratio = 0, 1.0
        for name, rows in of_runs.items():
            self._add(name, rows)
        self.flush()
        self._fixed_bytes = size_of(folder)

    def add(self, batch: Batch) -> None:
        """Append whole trajectories. Batches arrive in the bundle's order."""
        for name, rows in batch.tables.items():
            self._add(name, rows)
        self._texts.write(batch.texts)
        self._raw_bytes += batch.size_bytes
        self.trace_ids += batch.trace_ids
        self.redactions += batch.redactions
        self.unsearched += batch.unsearched

    def _add(self, name: str, rows: pa.Table) -> None:
        self._tables[name].add(rows)
        self.counts[name] += len(rows)

    def size_with(self, batch: Batch) -> int:
        """Estimate the bag's size in bytes with one more batch."""
        waiting = sum(table.waiting_bytes for table in self._tables.values())
        ids_bytes = 33 * (len(self.trace_ids) + len(batch.trace_ids))
        growth = int((waiting + batch.size_bytes) * self._ratio)
        return size_of(self.folder) + growth + ids_bytes

    def flush(self) -> None:
        """Write incomplete row groups, and measure how well the rows compress."""
        for table in self._tables.values():
            table.flush()
        self._texts_file.flush()
        if self._raw_bytes:
            written = size_of(self.folder) - self._fixed_bytes
            self._ratio = min(1.0, written / self._raw_bytes)

    def close(self) -> None:
        """Finish all files and sync them to the disk."""
        for table in self._tables.values():
            table.close()
        self._texts.close()
        self._texts_file.close()
        ids = "".join(f"{trace_id}\n" for trace_id in self.trace_ids)
        (self.folder / TRACE_IDS_FILE).write_text(ids, "utf-8")
        for path in (*self.folder.rglob("*"), self.folder):
            sync(path)


class _TableFiles:
    """The files of one table. A finished file is named after its content."""

    def __init__(self, folder: Path, schema: TableSchema) -> None:
        self._folder = folder / "tables" / schema.name
        self._schema = schema
        self._waiting = schema.arrow().empty_table()
        self._writer: pq.ParquetWriter | None = None
        self._path = self._folder

    @property
    def waiting_bytes(self) -> int:
        return int(self._waiting.nbytes)

    def add(self, rows: pa.Table) -> None:
        if len(rows) == 0:
            return
        waiting = pa.concat_tables([self._waiting, rows])
        *whole, self._waiting = row_groups(waiting, self._schema)
        for group in whole:
            self._write(group)

    def flush(self) -> None:
        if len(self._waiting):
            self._write(self._waiting)
            self._waiting = self._schema.arrow().empty_table()

    def close(self) -> None:
        self.flush()
        self._finish_file()

    def _write(self, group: pa.Table) -> None:
        if self._writer is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path = self._folder / f".{uuid.uuid4().hex}"
            self._writer = parquet_writer(self._path, self._schema.arrow())
        self._writer.write_table(group, row_group_size=len(group))
        if self._path.stat().st_size >= _FILE_BYTES:
            self._finish_file()

    def _finish_file(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        digest = sha256_of(self._path)[:32]
        os.replace(self._path, self._folder / f"v{FORMAT_VERSION}-{digest}.parquet")


def copy_origin(layout: StoreLayout, run_ids: Iterable[str], folder: Path) -> None:
    """Copy the store's identity, and the tokenizers of these runs."""
    (folder / META_NAME).write_bytes(meta_text(read_meta(layout)))
    for run_id in run_ids:
        source = tokenizer_file(layout, run_id)
        if source is None or not source.is_file():
            continue
        digest = sha256_of(source)
        kept = folder / "tokenizers" / digest / FILE_NAME
        pointer = folder / "tokenizers" / "runs" / pointer_in_bundle(run_id)
        for path in (kept, pointer):
            path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, kept)
        pointer.write_text(digest, "ascii")
