"""Pruning: calls of chosen trajectories leave the tables, their rows of `trajectories` stay.

Order of events, so that a crash at any point leaves no row that claims calls which are gone:

1. the chosen ids and the mark are written to `pruning.json`, and synced;
2. files of `trajectories` are rewritten, with the mark in `spans_pruned` of the chosen rows;
3. files of `spans` are rewritten without the chosen rows, or leave the table;
4. `pruning.json` is deleted.

After a crash the next pruning goes on from `pruning.json` before it does anything else, so that no
group stays half pruned. Every step does only what is left to do.

Only files of the partitions concerned are looked at. Those that are damaged or missing stay as they
are; then `pruning.json` stays too, for when they are restored, and so do all calls where a file of
`trajectories` is among them.

The commits say `dataChange: false` although rows go: delta-rs would else refuse what a sealer
appends at the same moment, and recording never suffers from a pruning.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from localtrace.errors import StoreError
from localtrace.maintain.prunable import Choice
from localtrace.schema import SPANS, TABLES, TRAJECTORIES, TableSchema
from localtrace.store.compacting.rewrite import Change, rewrite
from localtrace.store.files import exclusive, explained, put_file, read_json
from localtrace.store.layout import StoreLayout
from localtrace.store.tables.damaged_files import UNREADABLE, blamed_files, open_parquet
from localtrace.store.tables.delta import CommittedFile, committed_files, open_table
from localtrace.store.tables.log import heal_log
from localtrace.store.tables.replacing import replace_files, vacuum

Progress: TypeAlias = Callable[[int, int], None]
"""A function that gets the numbers of files done and known."""
Affected: TypeAlias = Callable[[pa.Table], pa.ChunkedArray]
"""A function that tells which rows of a file are to be changed, by their ids and marks."""

INTENT_NAME = "pruning.json"
LOCK_NAME = ".pruning"
_GO_ON = "free space and run localtrace prune again, which goes on where this ended"
_INTENT_MAX_BYTES = 2**30
_TRIES_MAX = 20
"""Looks at a table whose files other processes rewrite meanwhile."""


class Intent(msgspec.Struct, frozen=True):
    """The work of a pruning that has begun."""

    mark: str
    trace_ids: list[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]]
    folders: list[str]
    """Partitions of `spans` that hold their calls."""


@dataclass(slots=True)
class PruneReport:
    """The result of a pruning."""

    trajectories: int = 0
    rows: int = 0
    """Rows of `spans` that left the table."""
    freed_bytes: int = 0
    """Bytes that the files take less; the old files are deleted later."""
    problems: list[str] = field(default_factory=list)
    """Files that are damaged, and what to do about each."""


def begun(layout: StoreLayout) -> Intent | None:
    """Read what an earlier pruning began and did not finish; None: nothing.

    Raises:
        StoreFormatError: the file that tells it cannot be read.
    """
    try:
        return read_json(layout.root / INTENT_NAME, Intent, _INTENT_MAX_BYTES)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def alone(layout: StoreLayout, wait_s: float = 0.0) -> Iterator[list[str]]:
    """Hold the lock that allows one pruning of a store at a time, and heal torn logs.

    Yields:
        What was healed, in words.

    Raises:
        StoreBusy: another process prunes for longer than `wait_s`.
    """
    layout.refuse_bundle()
    busy = f"another process prunes {layout.root}: try again when it is done"
    with exclusive(layout.root / LOCK_NAME, wait_s, busy):
        yield [said for schema in TABLES.values() for said in heal_log(layout, schema)]


def prune(layout: StoreLayout, choice: Choice, progress: Progress | None = None) -> PruneReport:
    """Prune what was chosen. The caller holds `alone`, and has finished what was begun before.

    Args:
        progress: told the files that are done, and all that are to be rewritten.

    Raises:
        StoreError: a commit is refused again and again.
        OSError: a file cannot be written.
    """
    if not choice.groups:
        return PruneReport()
    mark = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {choice.rule}"
    left = begun(layout) or Intent("", [], [])  # what damaged files kept from being finished
    folders = {*left.folders, *(group.folder for group in choice.groups)}
    intent = Intent(mark, left.trace_ids + choice.trace_ids, sorted(folders))
    put_file(layout.root / INTENT_NAME, msgspec.json.encode(intent))
    return finish(layout, intent, progress)


def finish(layout: StoreLayout, intent: Intent, progress: Progress | None = None) -> PruneReport:
    """Do what is left to do of a pruning; the arguments and errors are those of `prune`."""
    with explained(f"pruning {layout.root} ended early", _GO_ON):
        return _finish(layout, intent, progress)


def _finish(layout: StoreLayout, intent: Intent, progress: Progress | None) -> PruneReport:
    ids = pa.array(intent.trace_ids, pa.string())
    work = _Work(layout, PruneReport(len(ids)), progress, set(intent.folders))

    def is_unmarked(rows: pa.Table) -> pa.ChunkedArray:
        return pc.and_(_is_in(rows, ids), pc.is_null(rows["spans_pruned"]))

    def mark(rows: pa.Table) -> pa.Table:
        place = rows.column_names.index("spans_pruned")
        marks = pc.if_else(is_unmarked(rows), intent.mark, rows["spans_pruned"])
        return rows.set_column(place, "spans_pruned", marks)

    work.rewrite(TRAJECTORIES, ["trace_id", "spans_pruned"], is_unmarked, mark)
    if not work.report.problems:  # else some may not be marked
        work.rewrite(
            SPANS,
            ["trace_id"],
            lambda rows: _is_in(rows, ids),
            lambda rows: rows.filter(pc.invert(_is_in(rows, ids))),
        )
    if not work.report.problems:
        (layout.root / INTENT_NAME).unlink(missing_ok=True)
    return work.report


def _is_in(rows: pa.Table, ids: pa.Array) -> pa.ChunkedArray:
    return pc.is_in(rows["trace_id"], value_set=ids)


def give_back(layout: StoreLayout, grace_hours: int) -> tuple[int, int]:
    """Delete files that were replaced before a grace period; return their number and bytes.

    Raises:
        StoreError: a table cannot be opened.
    """
    deleted = [vacuum(layout, schema, grace_hours) for schema in (TRAJECTORIES, SPANS)]
    return sum(count for count, _ in deleted), sum(size_bytes for _, size_bytes in deleted)


@dataclass(slots=True)
class _Work:
    """The files that one pruning rewrites."""

    layout: StoreLayout
    report: PruneReport
    progress: Progress | None
    folders: set[str]
    """Partitions of `spans`."""
    done: int = 0
    bad: set[CommittedFile] = field(default_factory=set)
    """Files that are damaged."""

    def rewrite(
        self, schema: TableSchema, columns: list[str], affected: Affected, change: Change
    ) -> None:
        """Rewrite the files of a table that have affected rows, until none has any."""
        counts: dict[str, tuple[int, int]] = {}
        """Affected rows and all rows of each file, by path."""
        for _ in range(_TRIES_MAX):
            emptied: list[CommittedFile] = []
            folders: dict[str, list[CommittedFile]] = defaultdict(list)
            for file in self._undamaged(schema):
                if file.path not in counts:
                    rows = self._read(schema, file, columns)
                    counts[file.path] = pc.sum(affected(rows)).as_py() or 0, len(rows)
                count, total = counts[file.path]
                if count and count == total and schema is SPANS:
                    emptied.append(file)
                elif count:
                    folders[file.folder].append(file)
            if not emptied and not folders:
                return
            known = self.done + len(emptied) + sum(map(len, folders.values()))
            for files in filter(None, (emptied, *folders.values())):
                new_bytes = self._replace(schema, files, None if files is emptied else change)
                if new_bytes is None:
                    continue
                self.report.freed_bytes += sum(file.size_bytes for file in files) - new_bytes
                if schema is SPANS:
                    self.report.rows += sum(counts[file.path][0] for file in files)
                self.done += len(files)
                if self.progress is not None:
                    self.progress(self.done, known)
        raise StoreError(f"the files of table {schema.name} change all the time: {_GO_ON}")

    def _undamaged(self, schema: TableSchema) -> Iterator[CommittedFile]:
        """Yield the files of the partitions, or of those around them, that can be read."""
        depth = len(schema.partitions)
        folders = {"/".join(folder.split("/")[:depth]) for folder in self.folders}
        for file in committed_files(open_table(self.layout, schema)):
            if file.folder in folders and file not in self.bad:
                yield file

    def _read(self, schema: TableSchema, file: CommittedFile, columns: list[str]) -> pa.Table:
        """Read columns of a file; no row, where it is damaged."""
        try:
            with open_parquet(file.place(self.layout, schema)) as opened:
                return opened.read(columns)
        except UNREADABLE as error:
            self._leave_alone(schema, [file], error)
        return schema.no_rows().select(columns)

    def _replace(
        self, schema: TableSchema, files: Sequence[CommittedFile], change: Change | None
    ) -> int | None:
        """Replace files by what they become, if anything; return its bytes.

        None where they are damaged, or another process replaced one meanwhile.
        """
        if change is None:
            return 0 if replace_files(self.layout, schema, files, []) else None
        try:
            made = rewrite(self.layout, schema, [files], change)
        except UNREADABLE as error:
            self._leave_alone(schema, files, error)
            return None
        return None if made is None else sum(file.size_bytes for file in made.new)

    def _leave_alone(
        self, schema: TableSchema, files: Sequence[CommittedFile], error: Exception
    ) -> None:
        """Note which files are damaged; raise the error where it has another cause."""
        damaged = blamed_files(self.layout, error, (schema, files))
        self.bad.update(damaged)
        self.report.problems += damaged.values()
