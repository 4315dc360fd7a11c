"""Gathering: what is new in other stores comes into one, exactly once.

Per table: look which rows the other store has beyond those that are here, bring the files that hold
them, and add them with one commit that says, for each writer, how far its rows are here now. Of two
gatherings at once one commit is refused, and looks again.

Files come as drafts, which readers pass over, and get their names once all new ones of a table are
there. Nothing that comes from the other store is believed: not its names, not whose rows a file
holds. Its journals are left to its own sealer: only the node that records can tell whether a
journal's writer still lives.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pyarrow as pa

from localtrace.errors import StoreError, StoreNotFound
from localtrace.schema import TABLES, TableSchema, refuse_other_version
from localtrace.store.files import (
    exclusive,
    is_file,
    make_folder,
    open_file,
    put_file,
    read_file,
    read_json,
)
from localtrace.store.gathered import Gathered, note_gathered
from localtrace.store.journal.folders import journal_folders
from localtrace.store.journal.journal_files import list_journals
from localtrace.store.layout import META_NAME, StoreLayout, open_layout, read_meta
from localtrace.store.tables.delta import (
    CommittedFile,
    Overtaken,
    committed_files,
    committed_number,
    open_table,
)
from localtrace.store.tables.drafts import Draft, drafting
from localtrace.store.tables.gathered_rows import (
    Held,
    RowRanges,
    commit_gathered,
    held_rows,
    row_ranges,
    rows_after,
)
from localtrace.store.tables.log import heal_log, torn_log_entry
from localtrace.store.tables.parquet_files import (
    MissingFile,
    open_parquet,
    partition_folder,
    partition_values,
    reading,
    write_rows,
)
from localtrace.store.tokenizers import FILE_MAX_BYTES, tokenizer_files

_TRIES_MAX = 20
_LOCK_WAIT_S = 600.0
_ALL = 2**63 - 1
_KNOWN_MAX_BYTES = 2**28
_BATCH_ROWS = 1024
_FILE_NAME = re.compile(r"v(\d{1,9})-[0-9a-f]{32}\.parquet", re.ASCII)
_TOKENIZER = re.compile(r"tokenizers/([0-9a-f]{64})/tokenizer\.json")
_TOKENIZER_OF_RUN = re.compile(r"tokenizers/runs/[\w.~=-]{1,255}", re.ASCII)


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
    paths: Sequence[str | Path],
    into: StoreLayout,
    progress: Callable[[int, int], None] | None = None,
) -> GatherReport:
    """Bring what is new in the stores of these folders into another one.

    Journals stay: their rows come once the store's own sealer has sealed them. A store that cannot
    be gathered is reported, and costs only itself.

    Args:
        paths: the folders.
        into: the store that gets the rows.
        progress: called with stores done and stores in all.

    Raises:
        StoreError: the other store cannot be written.
    """
    into.refuse_bundle()
    report = GatherReport()
    for number, path in enumerate(paths, start=1):
        with reported(report, path):
            try:
                source = open_layout(path)
            except StoreNotFound:
                text = f"no {META_NAME} is there: mount or copy a store to it"
                raise StoreNotFound(text) from None
            if source.bags:
                raise StoreError("this is a bundle: read it as a store of its own, with --store")
            if os.path.samefile(source.root, into.root):
                raise StoreError("this is the store to gather into")
            _Gathering(source, into, report).bring_all()
        if progress is not None:
            progress(number, len(paths))
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
        source: StoreLayout,
        into: StoreLayout,
        report: GatherReport,
    ) -> None:
        self._source, self._into = source, into
        self._store_id = read_meta(source).store_id
        self._report = report
        digest = hashlib.sha256(self._store_id.encode("utf-8", "surrogatepass")).hexdigest()
        self._folder = into.gathering / digest[:32]

    def bring_all(self) -> None:
        """Bring what is new.

        Raises:
            StoreError: the store cannot be read, or the other one cannot be written.
        """
        busy = (
            f"another process gathers from {self._source.root} into {self._into.root}: wait for "
            "it, or gather again later"
        )
        make_folder(self._into.root, self._folder)
        with exclusive(self._folder / ".lock", _LOCK_WAIT_S, busy):
            self._bring_tokenizers()
            for schema in TABLES.values():
                self._report.notes += heal_log(self._into, schema)
                self._bring(schema)
        self._report.stores += 1
        if waiting := len(list_journals(journal_folders(self._source))):
            self._report.notes.append(
                f"{self._source.root}: {waiting} journals are not sealed; their rows come with a "
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
            except (MissingFile, Overtaken) as error:  # compacted, or gathered by another
                problem = error
        raise StoreError(
            f"table {schema.name} lacks a file, or changes faster than it can be gathered "
            f"({problem}): gather again later, or copy the store again"
        ) from problem

    def _try(self, schema: TableSchema) -> None:
        if torn := torn_log_entry(self._source, schema):
            raise StoreError(f"{torn} is torn: run localtrace recover there, or copy it again")
        theirs, ours = open_table(self._source, schema), open_table(self._into, schema)
        known_file, known = self._folder / f"{schema.name}.json", _Known()
        with contextlib.suppress(OSError):
            known = read_json(known_file, _Known, _KNOWN_MAX_BYTES)
        if ours is None or known.version > ours.version():
            known = _Known()
        files, passed_over = committed_files(theirs), set(known.paths)
        ranges = {
            file: row_ranges(self._place(schema, file))
            for file in files
            if file.path not in passed_over
        }
        if not ranges:
            return
        last: dict[str, int] = {}
        for of_file in ranges.values():
            for writer, (_, high) in of_file.items():
                last[writer] = max(high, last.get(writer, high))
        journals = {writer: committed_number(theirs, writer) for writer in last}
        before = held_rows(ours, last)
        after = self._reached(schema, last, journals, before)
        # Rows up to these numbers are here; all rows of writers of whom nothing is new.
        here = {writer: held.row if writer in after else _ALL for writer, held in before.items()}
        new = [
            file
            for file, of_file in ranges.items()
            if any(high > here[writer] for writer, (_, high) in of_file.items())
        ]
        if new:
            self._add(schema, {file: ranges[file] for file in new}, here, before, after)
        self._note(schema, {writer: after.get(writer, held).row for writer, held in before.items()})
        version = -1 if (now := open_table(self._into, schema)) is None else now.version()
        known = _Known(version, [file.path for file in files])
        put_file(known_file, msgspec.json.encode(known))

    def _place(self, schema: TableSchema, file: CommittedFile) -> Path:
        """Return where a file is; a folder that is a link could lead out of the store."""
        place = self._source.root.resolve() / "tables" / schema.name / file.path
        if place.parent.resolve() != place.parent:
            raise StoreError(f"{place} lies behind a link: put the folder itself in its place")
        return place

    def _reached(
        self,
        schema: TableSchema,
        last: Mapping[str, int],
        journals: Mapping[str, int],
        before: Mapping[str, Held],
    ) -> dict[str, Held]:
        """Return how far the rows of each writer go once they are brought, where any is new."""
        after: dict[str, Held] = {}
        left_out: list[str] = []
        for writer, held in before.items():
            if last[writer] > held.row:
                # Rows may have been pruned here; the number of the journal tells that they were.
                if held.is_gathered and journals[writer] > held.journal:
                    after[writer] = Held(journals[writer], last[writer])
                else:
                    left_out.append(writer)
        if left_out:
            self._report.notes.append(
                f"{self._source.root}: later {schema.name} of {len(left_out)} processes are not "
                f"gathered (of {left_out[0]}), as a copy of this store was sealed while they "
                "recorded, and is here: read this store too, with --store"
            )
        return after

    def _add(
        self,
        schema: TableSchema,
        files: Mapping[CommittedFile, RowRanges],
        here: Mapping[str, int],
        before: Mapping[str, Held],
        after: Mapping[str, Held],
    ) -> None:
        """Bring files and commit their new rows.

        Raises:
            Overtaken: other rows of these writers came meanwhile; nothing was changed.
        """
        with drafting(self._into, schema) as drafts:
            for file, ranges in files.items():
                draft = drafts.add(self._partition(schema, file))
                self._fill(draft, schema, file, ranges, here)
                self._report.size_bytes += file.size_bytes
            placed = drafts.publish()
            commit_gathered(self._into, schema, placed, before, after)
        self._report.rows[schema.name] += sum(file.rows for file in placed)

    def _fill(
        self,
        draft: Draft,
        schema: TableSchema,
        file: CommittedFile,
        ranges: RowRanges,
        here: Mapping[str, int],
    ) -> None:
        """Copy a file, or its new rows alone where others are here."""
        place = self._place(schema, file)
        if all(low > here[writer] for writer, (low, _) in ranges.items()):
            with open(open_file(place), "rb") as source, open(draft.path, "xb") as copy:
                shutil.copyfileobj(source, copy)
            # Read through, as a damaged copy must not pass as whole.
            draft.rows = sum(map(len, _parts(draft.path, place, schema)))
        else:
            new = (rows_after(part, here) for part in _parts(place, place, schema))
            draft.rows = write_rows(draft.path, schema, new)

    def _partition(self, schema: TableSchema, file: CommittedFile) -> str:
        """Return the partition's folder, made anew from its values."""
        match = _FILE_NAME.fullmatch(os.path.basename(file.path))
        values = partition_values(file.folder)
        is_own = tuple(values) == schema.partitions and partition_folder(values) == file.folder
        if match is None or not is_own:
            raise StoreError(
                f"table {schema.name} has a file {file.path!r}, as localtrace names none: it is "
                "not gathered"
            )
        refuse_other_version(file.path, int(match[1]))
        if "folded" in values:  # into trajectories of the other store, which were here before
            values["folded"] = "false"
        return partition_folder(values)

    def _note(self, schema: TableSchema, rows: dict[str, int]) -> None:
        store_id = read_meta(self._into).store_id
        if store_id == self._store_id:
            return  # this store itself or a copy: its rows must not pass as being elsewhere
        note = Gathered(str(self._into.root), time.time_ns(), {schema.name: rows})
        with contextlib.suppress(OSError):  # a store that is only read cannot be pruned either
            note_gathered(self._source, store_id, note)

    def _bring_tokenizers(self) -> None:
        """Bring the tokenizers that are not here, and the files by which runs name theirs."""
        for path in sorted(tokenizer_files(self._source)):
            name = str(path.relative_to(self._source.root))
            if is_file(path) and not is_file(self._into.root / name):
                try:
                    self._keep(name, read_file(path, FILE_MAX_BYTES))
                except StoreError as error:
                    self._report.problems.append(f"{path}: not gathered: {error}")

    def _keep(self, name: str, data: bytes) -> None:
        if match := _TOKENIZER.fullmatch(name):
            if hashlib.sha256(data).hexdigest() != match[1]:
                raise StoreError("its content is not that which its folder names")
        elif _TOKENIZER_OF_RUN.fullmatch(name):
            tokenizer = f"tokenizers/{data.decode('ascii', 'replace')}/tokenizer.json"
            if not _TOKENIZER.fullmatch(tokenizer) or not is_file(self._into.root / tokenizer):
                raise StoreError("it names no tokenizer that is here")
        else:
            raise StoreError("no store has a file of this name")
        path = self._into.root / name
        make_folder(self._into.root, path.parent)
        put_file(path, data)


def _parts(path: Path, place: Path, schema: TableSchema) -> Iterator[pa.Table]:
    """Yield the rows of a table file, which errors name by its place in the other store."""
    with reading(place), open_parquet(path, schema) as opened:
        for batch in opened.iter_batches(_BATCH_ROWS):
            yield pa.Table.from_batches([batch])
