"""Gathering: what is new in other stores comes into one, exactly once.

Per table: look which rows the other store has beyond those that are here, bring the files that hold
them, and add them with one commit that says, for each writer, how far its rows are here now. Of two
gatherings at once one commit is refused, and looks again.

Files wait in `gathering/<store>/` until all new ones of a table are there, so a gathering that was
killed goes on where it was, and readers see nothing of it before the commit. Nothing that comes
from the other store is believed: not its names, not its sizes, not whose rows a file holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pyarrow as pa

from localtrace.cluster.source import Source, Survey, SurveyedFile
from localtrace.errors import StoreError, StoreNotFound
from localtrace.schema import TABLES, UPLOADS, TableSchema, refuse_other_version
from localtrace.store.files import exclusive, is_file, make_folder, put_file, read_json
from localtrace.store.gathered import Gathered, note_gathered
from localtrace.store.journal.folders import journal_folders
from localtrace.store.journal.journal_files import list_journals
from localtrace.store.layout import META_NAME, StoreLayout, read_meta
from localtrace.store.receipts import UPLOAD_ID
from localtrace.store.tables.damaged_files import open_parquet
from localtrace.store.tables.delta import open_table, removed_if_refused
from localtrace.store.tables.gathered_rows import (
    Held,
    Overtaken,
    commit_gathered,
    held_rows,
    row_ranges,
    rows_after,
)
from localtrace.store.tables.log import heal_log
from localtrace.store.tables.parquet_files import (
    WrittenFile,
    file_name,
    partition_folder,
    partition_values,
    sync_with_folders,
    write_rows,
    written_file,
)
from localtrace.store.tokenizers import FILE_MAX_BYTES

_TRIES_MAX = 20
_LOCK_WAIT_S = 600.0
_ALL = 2**63 - 1
_KNOWN_MAX_BYTES = 2**28
_BATCH_ROWS = 1024
_FILE_NAME = re.compile(r"v(\d{1,9})-[0-9a-f]{32}\.parquet", re.ASCII)
_TOKENIZER = re.compile(r"tokenizers/([0-9a-f]{64})/tokenizer\.json")
_TOKENIZER_OF_RUN = re.compile(r"tokenizers/runs/[\w.~=-]{1,255}", re.ASCII)
_RECEIPT = re.compile(rf"receipts/{UPLOAD_ID.pattern}\.(json|parquet)")
OnProgress = Callable[[int, int], None]
"""Called with the bytes that have come and the bytes that are known to be new."""


@dataclass(slots=True)
class GatherReport:
    """The result of `gather`."""

    stores: int = 0
    """Stores whose rows are here now, as far as they were sealed."""
    failed: int = 0
    """Stores that could not be gathered, or not wholly."""
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))
    size_bytes: int = 0
    problems: list[str] = field(default_factory=list)
    """Stores that were not gathered, or not wholly, each with the reason."""
    notes: list[str] = field(default_factory=list)
    """Remarks about stores that were gathered."""
    wanted_bytes: int = 0
    """Bytes of files with new rows, as far as they are known."""

    def add(self, part: GatherReport, place: str) -> None:
        """Add what another process gathered, from somewhere that its texts do not name."""
        self.stores += part.stores
        self.failed += part.failed
        self.size_bytes += part.size_bytes
        for table, rows in part.rows.items():
            self.rows[table] += rows
        self.problems += [f"{place}: {text}" for text in part.problems]
        self.notes += [f"{place}: {text}" for text in part.notes]


def gather(
    paths: Iterable[str | Path], into: StoreLayout, on_progress: OnProgress | None = None
) -> GatherReport:
    """Bring what is new in the stores of these folders into another one.

    Journals stay: their rows come once the store's own sealer has sealed them. A store that cannot
    be gathered is reported, and costs only itself.

    Args:
        paths: the folders.
        into: the store that gets the rows.
        on_progress: called with bytes that have come and bytes known to be new.

    Raises:
        StoreError: the other store cannot be written.
    """
    into.refuse_bundle()
    report = GatherReport()
    for path in paths:
        with reported(report, path):
            try:
                source = Source(path)
            except StoreNotFound:
                text = f"no {META_NAME} is there: mount or copy a store to it"
                raise StoreNotFound(text) from None
            if os.path.samefile(source.layout.root, into.root):
                raise StoreError("this is the store to gather into")
            _Gathering(source, into, report, on_progress).bring_all()
    return report


@contextlib.contextmanager
def reported(report: GatherReport, place: str | Path) -> Iterator[None]:
    """Add the failure of one store to a report instead of raising it."""
    try:
        yield
    except OSError as error:
        report.failed += 1
        report.problems.append(f"{place}: not gathered: {error}")


class _Known(msgspec.Struct):
    """Files of the other store without new rows, so that a later gathering does not open them."""

    version: int = -1
    """Version of this store's table then; an older one, restored from a copy, may lack rows."""
    paths: list[str] = []


class _Gathering:
    """One store on its way into another."""

    def __init__(
        self,
        source: Source,
        into: StoreLayout,
        report: GatherReport,
        on_progress: OnProgress | None,
    ) -> None:
        self._source, self._into = source, into
        self._root = source.layout.root
        self._report, self._on_progress = report, on_progress
        digest = hashlib.sha256(source.store_id.encode("utf-8", "surrogatepass")).hexdigest()
        self._folder = into.gathering / digest[:32]

    def bring_all(self) -> None:
        """Bring what is new.

        Raises:
            StoreError: the store cannot be read, or the other one cannot be written.
        """
        busy = (
            f"another process gathers from {self._root} into {self._into.root}: wait for it, or "
            "gather again later"
        )
        make_folder(self._into.root, self._folder)
        with exclusive(self._folder / ".lock", _LOCK_WAIT_S, busy):
            self._bring_others()
            for schema in TABLES.values():
                self._report.notes += heal_log(self._into, schema)
                self._bring(schema)
        self._report.stores += 1
        if waiting := len(list_journals(journal_folders(self._source.layout))):
            self._report.notes.append(
                f"{self._root}: {waiting} journals are not sealed; their rows come with a "
                "gathering after its sealer, or localtrace seal on its node, has sealed them"
            )

    def _bring(self, schema: TableSchema) -> None:
        """Bring the new rows of a table.

        Raises:
            StoreError: a file cannot be read, or is not what it should be.
        """
        problem: Exception | None = None
        for _ in range(_TRIES_MAX):
            try:
                return self._try(schema)
            except (FileNotFoundError, Overtaken) as error:  # compacted, or gathered by another
                problem = error
        raise StoreError(
            f"table {schema.name} lacks a file, or changes faster than it can be gathered "
            f"({problem}): gather again later, or copy the store again"
        ) from problem

    def _try(self, schema: TableSchema) -> None:
        list_of_known = self._folder / f"{schema.name}.json"
        known = _Known()
        with contextlib.suppress(OSError):
            known = read_json(list_of_known, _Known, _KNOWN_MAX_BYTES)
        if known.version > self._version(schema):
            known = _Known()
        survey = self._source.survey(schema, frozenset(known.paths))
        if not survey.files:
            return
        before = held_rows(self._into, schema, open_table(self._into, schema), survey.journals)
        after = self._reached(schema, survey, before)
        # Rows up to these numbers are here; all rows of writers of whom nothing is new.
        here = {writer: held.row if writer in after else _ALL for writer, held in before.items()}
        new = [
            file
            for file in survey.files
            if any(high > here[writer] for writer, (_, high) in file.ranges.items())
        ]
        if new:
            self._add(schema, new, here, {writer: before[writer] for writer in after}, after)
        self._note(schema, {writer: after.get(writer, held).row for writer, held in before.items()})
        known = _Known(self._version(schema), survey.paths)
        put_file(list_of_known, msgspec.json.encode(known))

    def _version(self, schema: TableSchema) -> int:
        table = open_table(self._into, schema)
        return -1 if table is None else table.version()

    def _reached(
        self, schema: TableSchema, survey: Survey, before: Mapping[str, Held]
    ) -> dict[str, Held]:
        """Return how far the rows of each writer go once they are brought, where any is new."""
        last: dict[str, int] = {}
        for file in survey.files:
            for writer, (_, high) in file.ranges.items():
                last[writer] = max(high, last.get(writer, high))
        after: dict[str, Held] = {}
        left_out: list[str] = []
        for writer, held in before.items():
            journal = survey.journals[writer]
            # Rows may have been pruned here; the number of the journal tells that they were here.
            if last[writer] > held.row and (journal > held.journal or journal < 0):
                after[writer] = Held(max(journal, held.journal, 0), last[writer])
            elif last[writer] > held.row and held.gathered:
                left_out.append(writer)
        if left_out:
            self._report.notes.append(
                f"{self._root}: later {schema.name} of {len(left_out)} processes are not "
                f"gathered (of {left_out[0]}), as a copy of this store was sealed while they "
                "recorded, and gathered: read this store too, with --store"
            )
        return after

    def _add(
        self,
        schema: TableSchema,
        files: Sequence[SurveyedFile],
        here: Mapping[str, int],
        before: Mapping[str, Held],
        after: Mapping[str, Held],
    ) -> None:
        """Bring files and commit their new rows.

        Raises:
            Overtaken: other rows of these writers came meanwhile; nothing was changed.
        """
        self._report.wanted_bytes += sum(file.size_bytes for file in files)
        staged = [self._fetch(schema, file) for file in files]
        placed: list[WrittenFile] = []
        with removed_if_refused(self._into, schema, placed):
            for file, path in zip(files, staged, strict=True):
                placed.append(self._place(schema, file, path, here))
            commit_gathered(self._into, schema, placed, before, after)
        self._report.rows[schema.name] += sum(file.rows for file in placed)
        shutil.rmtree(self._folder / schema.name, ignore_errors=True)

    def _fetch(self, schema: TableSchema, file: SurveyedFile) -> Path:
        """Bring a file, unless an earlier gathering did, and check it."""
        name = f"tables/{schema.name}/{file.path}"
        match = _FILE_NAME.fullmatch(os.path.basename(file.path))
        if match is None:
            raise StoreError(
                f"{self._root} names a table file {file.path!r}, as localtrace names none: "
                "it is not gathered"
            )
        refuse_other_version(f"{self._root}/{name}", int(match[1]))
        staged = self._folder / schema.name / match[0]
        if is_file(staged) and staged.stat().st_size == file.size_bytes:
            self._tell(file.size_bytes)
        else:
            make_folder(self._into.root, staged.parent)
            put_file(staged, self._told(self._source.read(name, file.size_bytes)))
        try:
            self._check(staged, schema, file)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        return staged

    def _check(self, staged: Path, schema: TableSchema, file: SurveyedFile) -> None:
        place = f"{self._root}/tables/{schema.name}/{file.path}"
        try:
            with open_parquet(staged) as opened:
                columns = opened.schema_arrow
                for _ in opened.iter_batches(_BATCH_ROWS):  # a damaged copy must not pass as whole
                    pass
        except (pa.ArrowException, OSError) as error:
            raise StoreError(
                f"{place} cannot be read ({str(error).splitlines()[0]}): it is not gathered; "
                "restore it, or copy it again"
            ) from error
        if not columns.equals(schema.file_arrow()) or row_ranges(staged) != file.ranges:
            raise StoreError(
                f"{place} has other columns, or rows of other processes, than it should: it is not "
                "gathered"
            )

    def _place(
        self, schema: TableSchema, file: SurveyedFile, staged: Path, here: Mapping[str, int]
    ) -> WrittenFile:
        """Put a file into its table, whole or its new rows alone, for a commit to name."""
        path = self._into.table(schema.name) / self._partition(schema, file) / file_name()
        make_folder(self._into.root, path.parent)
        if all(low > here[writer] for writer, (low, _) in file.ranges.items()):
            os.utime(staged)  # otherwise it could pass for an unfinished file of long ago
            os.replace(staged, path)
            with open_parquet(path) as opened:
                count = opened.metadata.num_rows
        else:
            count = write_rows(path, schema, _new_rows(staged, here))
        sync_with_folders(self._into, path)
        return written_file(self._into, schema, path, count)

    def _partition(self, schema: TableSchema, file: SurveyedFile) -> str:
        """Return the partition's folder, made anew from its values."""
        folder = os.path.dirname(file.path)
        values = partition_values(folder)
        if tuple(values) != schema.partitions or partition_folder(values) != folder:
            raise StoreError(
                f"{self._root} names a folder {folder!r}, which is no partition of "
                f"{schema.name}: it is not gathered"
            )
        if "folded" in values:  # into trajectories of the other store, which were here before
            values["folded"] = "false"
        return partition_folder(values)

    def _note(self, schema: TableSchema, rows: dict[str, int]) -> None:
        store_id = read_meta(self._into).store_id
        if store_id == self._source.store_id:
            return  # this store itself or a copy: its rows must not pass as being elsewhere
        note = Gathered(str(self._into.root), time.time_ns(), {schema.name: rows})
        with contextlib.suppress(OSError):  # a store that is only read cannot be pruned either
            note_gathered(self._source.layout, store_id, note)

    def _told(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            yield piece
            self._tell(len(piece))

    def _tell(self, size_bytes: int) -> None:
        self._report.size_bytes += size_bytes
        if self._on_progress is not None:
            self._on_progress(self._report.size_bytes, self._report.wanted_bytes)

    def _bring_others(self) -> None:
        """Bring the tokenizers and receipts that are not here."""
        for name, size_bytes in sorted(self._source.others().items()):
            if is_file(self._into.root / name):
                continue
            try:
                if size_bytes > FILE_MAX_BYTES:
                    raise StoreError(f"it has {size_bytes:,} bytes, too many for such a file")
                self._keep(name, b"".join(self._source.read(name, size_bytes)))
            except FileNotFoundError:
                continue  # replaced meanwhile
            except StoreError as error:
                self._report.problems.append(f"{self._root}/{name}: not gathered: {error}")

    def _keep(self, name: str, data: bytes) -> None:
        if match := _TOKENIZER.fullmatch(name):
            if hashlib.sha256(data).hexdigest() != match[1]:
                raise StoreError("its content is not that which its folder names")
        elif _TOKENIZER_OF_RUN.fullmatch(name):
            tokenizer = f"tokenizers/{data.decode('ascii', 'replace')}/tokenizer.json"
            if not _TOKENIZER.fullmatch(tokenizer) or not is_file(self._into.root / tokenizer):
                raise StoreError("it names no tokenizer that is here")
        elif not _RECEIPT.fullmatch(name):
            raise StoreError("no store has a file of this name")
        elif name.endswith(".parquet"):
            _refuse_other_than_receipt(data)
        path = self._into.root / name
        make_folder(self._into.root, path.parent)
        put_file(path, data)


def _new_rows(staged: Path, here: Mapping[str, int]) -> Iterator[pa.Table]:
    with open_parquet(staged) as opened:
        for batch in opened.iter_batches(_BATCH_ROWS):
            yield rows_after(pa.Table.from_batches([batch]), here)


def _refuse_other_than_receipt(data: bytes) -> None:
    import pyarrow.parquet as pq

    known = {column.name: column.type for column in UPLOADS.arrow()}
    try:
        columns = {column.name: column.type for column in pq.read_schema(pa.BufferReader(data))}
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"it is no table of a receipt ({str(error).splitlines()[0]})") from error
    if not columns or not columns.items() <= known.items():
        raise StoreError("it is no table of a receipt (it has other columns)")
