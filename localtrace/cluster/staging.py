"""Files of another store on their way into this one.

They wait in `gathering/<store>/` until all new files of a table are there, so a gathering that was
killed goes on where it was, and readers see nothing of it before the commit. Nothing that comes
from the other store is believed: not its names, not its sizes, not whose rows a file holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa

from localtrace.cluster.folder_store import Source, SurveyedFile
from localtrace.errors import StoreError, StoreUnwritable
from localtrace.schema import TableSchema, refuse_other_version
from localtrace.store.files import exclusive, is_file, make_folder, put_file, read_json
from localtrace.store.layout import StoreLayout
from localtrace.store.tables.delta import is_any_committed
from localtrace.store.tables.gathered_rows import row_ranges, rows_after
from localtrace.store.tables.parquet_files import (
    WrittenFile,
    file_name,
    partition_folder,
    partition_values,
    sync_with_folders,
    write_rows,
    written_file,
)

_FILE_NAME = re.compile(r"v(\d{1,9})-[0-9a-f]{32}\.parquet", re.ASCII)
_FOLDER_MAX_BYTES = 255
_KNOWN_MAX_BYTES = 2**28
_RESERVE_BYTES = 64 * 2**20
_BATCH_ROWS = 1024
Tell = Callable[[int], None]
"""Called with the number of bytes that have come."""


class _Known(msgspec.Struct):
    """Files of the other store without new rows, so that a later gathering does not open them."""

    version: int
    """Version of this store's table then; an older one, restored from a copy, may lack rows."""
    paths: list[str]


class Staging:
    """The folder for files of one other store."""

    def __init__(self, into: StoreLayout, source: Source) -> None:
        self._into = into
        self._source = source
        digest = hashlib.sha256(source.store_id.encode("utf-8", "surrogatepass")).hexdigest()
        self.folder = into.gathering / digest[:32]

    @contextlib.contextmanager
    def locked(self, wait_s: float) -> Iterator[None]:
        """Keep other gatherings from the same store out: they would bring the same files again.

        Raises:
            StoreBusy: another one is at work for longer than `wait_s`.
        """
        make_folder(self._into.root, self.folder)
        with exclusive(
            self.folder / ".lock",
            wait_s,
            f"another process gathers from {self._source.place} into {self._into.root}: wait for "
            "it, or gather again later",
        ):
            yield

    def known(self, schema: TableSchema, version: int) -> frozenset[str]:
        """Return files of the other store that hold nothing new, as of an earlier gathering."""
        with contextlib.suppress(OSError):
            known = read_json(self._known(schema), _Known, _KNOWN_MAX_BYTES)
            if known.version <= version:
                return frozenset(known.paths)
        return frozenset()

    def remember(self, schema: TableSchema, version: int, paths: Sequence[str]) -> None:
        """Write down files of the other store that hold nothing new from now on."""
        put_file(self._known(schema), msgspec.json.encode(_Known(version, list(paths))))

    def _known(self, schema: TableSchema) -> Path:
        return self.folder / f"{schema.name}.json"

    def require_room(self, schema: TableSchema, files: Sequence[SurveyedFile]) -> None:
        """Refuse files for which the disk has no room.

        Raises:
            StoreUnwritable: there is not enough.
        """
        missing = sum(file.size_bytes for file in files if not self._is_there(schema, file))
        free = shutil.disk_usage(self.folder).free
        if missing + _RESERVE_BYTES > free:
            raise StoreUnwritable(
                f"table {schema.name} has {missing:,} new bytes, for which "
                f"{missing + _RESERVE_BYTES:,} must be free in {self._into.root}, and only "
                f"{free:,} are: make room and gather again"
            )

    def fetch(self, schema: TableSchema, file: SurveyedFile, tell: Tell) -> None:
        """Bring a file, unless an earlier gathering did, and check it.

        Raises:
            FileNotFoundError: it is gone.
            StoreError: it is not what a table file should be.
        """
        path = self._path(schema, file)
        if not self._is_there(schema, file):
            make_folder(self._into.root, path.parent)
            pieces = self._source.read(f"tables/{schema.name}/{file.path}", file.size_bytes)
            put_file(path, _told(pieces, tell))
        else:
            tell(file.size_bytes)
        try:
            self._check(path, schema, file)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _is_there(self, schema: TableSchema, file: SurveyedFile) -> bool:
        path = self._path(schema, file)
        return is_file(path) and path.stat().st_size == file.size_bytes

    def _path(self, schema: TableSchema, file: SurveyedFile) -> Path:
        name = os.path.basename(file.path)
        match = _FILE_NAME.fullmatch(name)
        if match is None:
            raise StoreError(
                f"{self._source.place} names a table file {file.path!r}, as localtrace names none: "
                "it is not gathered"
            )
        refuse_other_version(f"{self._source.place}: the table file {file.path}", int(match[1]))
        return self.folder / schema.name / name

    def _check(self, path: Path, schema: TableSchema, file: SurveyedFile) -> None:
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as opened:
                columns = opened.schema_arrow
                for _ in opened.iter_batches(_BATCH_ROWS):  # a damaged copy must not pass as whole
                    pass
        except (pa.ArrowException, OSError) as error:
            raise StoreError(
                f"{self._source.place}/tables/{schema.name}/{file.path} cannot be read "
                f"({str(error).splitlines()[0]}): it is not gathered; restore it, or copy it again"
            ) from error
        if not columns.equals(schema.file_arrow()) or row_ranges(path) != file.ranges:
            raise StoreError(
                f"{self._source.place}/tables/{schema.name}/{file.path} has other columns, or rows "
                "of other processes, than it should: it is not gathered"
            )

    def place(
        self, schema: TableSchema, file: SurveyedFile, here: Mapping[str, int]
    ) -> WrittenFile:
        """Move a file into its table, whole or its new rows alone, for a commit to name.

        Args:
            here: by writer, the `writer_seq` up to which rows are here.

        Raises:
            FileNotFoundError: another gathering took it.
        """
        staged, folder = self._path(schema, file), self._folder(schema, file)
        is_new = all(low > here[writer_id] for writer_id, (low, _) in file.ranges.items())
        path = self._into.table(schema.name) / folder / file_name()
        make_folder(self._into.root, path.parent)
        if is_new:
            os.utime(staged)  # else it could pass for an unfinished file that was left long ago
            os.replace(staged, path)
            rows = _row_count(path)
        else:
            rows = write_rows(path, schema, _new_rows(staged, schema, here))
        sync_with_folders(self._into, path)
        return written_file(self._into, schema, path, rows)

    def _folder(self, schema: TableSchema, file: SurveyedFile) -> str:
        """Return the partition's folder, made anew from its values."""
        given = os.path.dirname(file.path)
        values = partition_values(given)
        if (
            tuple(values) != schema.partitions
            or partition_folder(values) != given
            or any(len(part.encode()) > _FOLDER_MAX_BYTES for part in given.split("/"))
        ):
            raise StoreError(
                f"{self._source.place} names a folder {given!r}, which is no partition of "
                f"{schema.name}: it is not gathered"
            )
        if "folded" in values:  # into trajectories of the other store, which were here before
            values["folded"] = "false"
        return partition_folder(values)

    def take_back(
        self, schema: TableSchema, files: Sequence[tuple[SurveyedFile, WrittenFile]]
    ) -> None:
        """Undo `place` for files whose commit was refused, unless it was done in spite of that."""
        if is_any_committed(self._into, schema, [written for _, written in files]):
            return
        for file, written in files:
            path = self._into.table(schema.name) / written.path
            staged = self._path(schema, file)
            if staged.exists():
                path.unlink()
            else:
                os.replace(path, staged)

    def clear(self, schema: TableSchema) -> None:
        """Remove the files of a table that is done."""
        shutil.rmtree(self.folder / schema.name, ignore_errors=True)


def _told(pieces: Iterator[bytes], tell: Tell) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        tell(len(piece))


def _row_count(path: Path) -> int:
    import pyarrow.parquet as pq

    return int(pq.read_metadata(path).num_rows)


def _new_rows(path: Path, schema: TableSchema, here: Mapping[str, int]) -> Iterator[pa.Table]:
    """Yield the new rows of a file."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH_ROWS):
            yield rows_after(pa.Table.from_batches([batch]), here)
