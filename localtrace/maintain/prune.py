"""Pruning: calls of chosen trajectories leave the tables, their rows of `trajectories` stay.

Order of events, so that a crash at any point leaves no row that claims calls which are gone:

1. the chosen ids and the mark are written to `pruning.json`, and synced;
2. files of `trajectories` are rewritten, with the mark in `spans_pruned` of the chosen rows;
3. files of `spans` are rewritten without the chosen rows, or leave the table;
4. `pruning.json` is deleted.

After a crash the next pruning goes on from `pruning.json` before it does anything else, so that no
group stays half pruned. Every step does only what is left to do.

Files that are damaged or missing stay as they are, and the rest is done. Then `pruning.json` stays
too, for when they are restored, and calls go only where the mark of their trajectory was written.

The commits say `dataChange: false` although rows go: delta-rs would else refuse what a sealer
appends at the same moment, and recording never suffers from a pruning.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
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
_EMPTIED_MAX = 1000
"""Files that leave a table by one commit."""
_BATCH_BYTES = 256 * 2**20
"""The size of files that one commit replaces, about: a crash costs the rewriting of so much."""


class Intent(msgspec.Struct, frozen=True):
    """The work of a pruning that has begun."""

    mark: str
    trace_ids: list[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]]


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
    left = begun(layout)  # what damaged files kept from being finished
    intent = Intent(mark, [*(left.trace_ids if left else ()), *choice.trace_ids])
    put_file(layout.root / INTENT_NAME, msgspec.json.encode(intent))
    return finish(layout, intent, progress)


def finish(layout: StoreLayout, intent: Intent, progress: Progress | None = None) -> PruneReport:
    """Do what is left to do of a pruning; the arguments and errors are those of `prune`."""
    with explained(f"pruning {layout.root} ended early", _GO_ON):
        return _finish(layout, intent, progress)


def _finish(layout: StoreLayout, intent: Intent, progress: Progress | None) -> PruneReport:
    report = PruneReport(len(intent.trace_ids))
    ids = pa.array(intent.trace_ids, pa.string())
    work = _Work(layout, report, progress)
    work.rewrite(
        TRAJECTORIES, partial(_unmarked, ids=ids), partial(_marked, ids=ids, intent=intent)
    )
    if report.problems:
        ids = work.marked_ids(ids)
    work.rewrite(SPANS, partial(_chosen, ids=ids), partial(_without, ids=ids))
    if not report.problems:
        (layout.root / INTENT_NAME).unlink(missing_ok=True)
    return report


def give_back(layout: StoreLayout, grace_hours: int) -> tuple[int, int]:
    """Delete files that were replaced before a grace period; return their number and bytes.

    Raises:
        StoreError: a table cannot be opened.
    """
    found = [vacuum(layout, schema, grace_hours) for schema in (TRAJECTORIES, SPANS)]
    return sum(count for count, _ in found), sum(size_bytes for _, size_bytes in found)


class _Work:
    """The files that one pruning rewrites."""

    def __init__(self, layout: StoreLayout, report: PruneReport, progress: Progress | None) -> None:
        self._layout = layout
        self._report = report
        self._progress = progress
        self._done = 0
        self._bad: set[CommittedFile] = set()

    def marked_ids(self, ids: pa.Array) -> pa.Array:
        """Return those of some trajectories whose mark is on the disk."""
        found = [ids[:0]]
        for file in committed_files(open_table(self._layout, TRAJECTORIES)):
            if file not in self._bad:
                rows = _read(file.place(self._layout, TRAJECTORIES))
                if "spans_pruned" in rows.column_names:
                    rows = rows.filter(pc.is_valid(rows["spans_pruned"]))
                    found += rows.filter(_chosen(rows, ids))["trace_id"].chunks
        return pa.concat_arrays(found)

    def rewrite(self, schema: TableSchema, affected: Affected, change: Change) -> None:
        """Rewrite the files of a table that have affected rows, until none has any."""
        counts: dict[str, tuple[int, int]] = {}
        for _ in range(_TRIES_MAX):
            files = self._affected(schema, affected, counts)
            if not files:
                return
            known = self._done + len(files)
            for batch in _batches(files, counts, is_drop=schema is SPANS):
                old, new_bytes = self._replace(schema, batch, change)
                self._report.freed_bytes += sum(file.size_bytes for file in old) - new_bytes
                if schema is SPANS:
                    self._report.rows += sum(counts[file.path][0] for file in old)
                self._done += len(old)
                if self._progress is not None:
                    self._progress(self._done, known)
        raise StoreError(f"the files of table {schema.name} change all the time: {_GO_ON}")

    def _affected(
        self, schema: TableSchema, affected: Affected, counts: dict[str, tuple[int, int]]
    ) -> list[CommittedFile]:
        """Return the files with affected rows.

        Args:
            counts: by path, the affected rows and all rows; files that are new are added.
        """
        found = []
        for file in committed_files(open_table(self._layout, schema)):
            if file in self._bad:
                continue
            if file.path not in counts:
                try:
                    rows = _read(file.place(self._layout, schema))
                    counts[file.path] = pc.sum(affected(rows)).as_py() or 0, len(rows)
                except UNREADABLE as error:
                    self._leave_alone(schema, [file], error)
            if counts.get(file.path, (0, 0))[0]:
                found.append(file)
        return found

    def _leave_alone(
        self, schema: TableSchema, files: Sequence[CommittedFile], error: Exception
    ) -> None:
        """Note which files cannot be read; raise the error where it has another cause."""
        damaged = blamed_files(self._layout, error, (schema, files))
        self._bad.update(damaged)
        self._report.problems += damaged.values()

    def _replace(
        self, schema: TableSchema, batch: _Batch, change: Change
    ) -> tuple[Sequence[CommittedFile], int]:
        """Return the files that left the table, and the bytes of those in their place."""
        if batch.is_emptied:
            files = [file for group in batch.groups for file in group]
            return (files if replace_files(self._layout, schema, files, []) else []), 0
        try:
            made = rewrite(self._layout, schema, batch.groups, change)
        except UNREADABLE as error:
            self._leave_alone(schema, [file for group in batch.groups for file in group], error)
            return [], 0  # the caller looks again
        if made is None:
            return [], 0
        return made.old, sum(file.size_bytes for file in made.new)


def _read(path: Path) -> pa.Table:
    with open_parquet(path) as file:
        names = {"trace_id", "spans_pruned"} & set(file.schema_arrow.names)
        return file.read(sorted(names))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Files that one commit replaces, by partition."""

    groups: list[list[CommittedFile]]
    is_emptied: bool = False
    """True where no row of them is left, so that they need not be read."""


def _batches(
    files: Sequence[CommittedFile], counts: Mapping[str, tuple[int, int]], *, is_drop: bool
) -> Iterator[_Batch]:
    emptied = [file for file in files if is_drop and len(set(counts[file.path])) == 1]
    for start in range(0, len(emptied), _EMPTIED_MAX):
        yield _Batch([emptied[start : start + _EMPTIED_MAX]], is_emptied=True)
    folders: dict[str, list[CommittedFile]] = defaultdict(list)
    for file in files:
        if not is_drop or len(set(counts[file.path])) > 1:
            folders[file.folder].append(file)
    groups: list[list[CommittedFile]] = []
    for group in folders.values():
        groups.append(group)
        if sum(file.size_bytes for one in groups for file in one) >= _BATCH_BYTES:
            yield _Batch(groups)
            groups = []
    if groups:
        yield _Batch(groups)


def _chosen(rows: pa.Table, ids: pa.Array) -> pa.ChunkedArray:
    return pc.is_in(rows["trace_id"], value_set=ids)


def _without(rows: pa.Table, ids: pa.Array) -> pa.Table:
    return rows.filter(pc.invert(_chosen(rows, ids)))


def _unmarked(rows: pa.Table, ids: pa.Array) -> pa.ChunkedArray:
    return pc.and_(_chosen(rows, ids), pc.is_null(rows["spans_pruned"]))


def _marked(rows: pa.Table, ids: pa.Array, intent: Intent) -> pa.Table:
    marks = pc.if_else(_unmarked(rows, ids), intent.mark, rows["spans_pruned"])
    return rows.set_column(rows.column_names.index("spans_pruned"), "spans_pruned", marks)
