"""Gathering: what is new in other stores comes into one, exactly once.

Per table: look which rows the other store has beyond those that are here, bring the files that hold
them, and add them with one commit that says, for each writer, how far its rows are here now. Of two
gatherings at once one commit is refused, and looks again. Killed at any point, a gathering leaves
only files that nothing names; the next one uses those that are whole.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from localtrace.cluster.folder_store import FolderStore, Source, Survey, SurveyedFile
from localtrace.cluster.others import bring_others
from localtrace.cluster.staging import Staging
from localtrace.errors import StoreError, StoreNotFound
from localtrace.schema import TABLES, TableSchema
from localtrace.store.gathered import Gathered
from localtrace.store.layout import META_NAME, StoreLayout, read_meta
from localtrace.store.tables.delta import open_table
from localtrace.store.tables.gathered_rows import Held, commit_gathered, held_rows
from localtrace.store.tables.log import heal_log
from localtrace.store.tables.parquet_files import WrittenFile

_TRIES_MAX = 20
_LOCK_WAIT_S = 600.0
_ALL = 2**63 - 1
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


def gather(
    paths: Iterable[str | Path],
    into: StoreLayout,
    *,
    report: GatherReport | None = None,
    on_progress: OnProgress | None = None,
) -> GatherReport:
    """Bring what is new in the stores of these folders into another one.

    Journals stay: their rows come once the store's own sealer has sealed them. A store that cannot
    be gathered is reported, and costs only itself.

    Args:
        paths: the folders.
        into: the store that gets the rows.
        report: a report to add to and return; a new one when not given.
        on_progress: called with bytes that have come and bytes known to be new.

    Raises:
        StoreError: the other store cannot be written.
    """
    report = report or GatherReport()
    for path in paths:
        with reported(report, path):
            source = _opened(path)
            if os.path.samefile(source.layout.root, into.root):
                raise StoreError("this is the store to gather into")
            gather_from(source, into, report, on_progress)
    return report


def _opened(path: str | Path) -> FolderStore:
    try:
        return FolderStore(path)
    except StoreNotFound:
        raise StoreNotFound(f"no {META_NAME} is there: mount or copy a store to it") from None


@contextlib.contextmanager
def reported(report: GatherReport, place: str | Path) -> Iterator[None]:
    """Add the failure of one store to a report instead of raising it."""
    try:
        yield
    except OSError as error:
        report.failed += 1
        report.problems.append(f"{place}: not gathered: {error}")


def gather_from(
    source: Source, into: StoreLayout, report: GatherReport, on_progress: OnProgress | None = None
) -> None:
    """Bring what is new in one store into another, and add what was brought to a report.

    Raises:
        StoreError: the store cannot be read, or the other one cannot be written.
    """
    into.refuse_bundle()
    staging = Staging(into, source)
    with staging.locked(_LOCK_WAIT_S):
        bring_others(source, into, staging.folder, report.problems)
        for schema in TABLES.values():
            report.notes += heal_log(into, schema)
            _Table(source, into, staging, schema, report, on_progress).bring()
    report.stores += 1
    if waiting := source.waiting():
        report.notes.append(
            f"{source.place}: {waiting} journals are not sealed; their rows come with a gathering "
            "after its sealer, or localtrace seal on its node, has sealed them"
        )


class _Table:
    """One table on its way from one store to another."""

    def __init__(
        self,
        source: Source,
        into: StoreLayout,
        staging: Staging,
        schema: TableSchema,
        report: GatherReport,
        on_progress: OnProgress | None,
    ) -> None:
        self._source, self._into, self._staging = source, into, staging
        self._schema, self._report, self._on_progress = schema, report, on_progress

    def bring(self) -> None:
        """Bring the new rows.

        Raises:
            StoreError: a file cannot be read, or is not what it should be.
        """
        for _ in range(_TRIES_MAX):
            with contextlib.suppress(FileNotFoundError):  # replaced by a compaction
                if self._try():
                    return
        raise StoreError(
            f"table {self._schema.name} changes faster than it can be gathered: gather again later"
        )

    def _try(self) -> bool:
        schema, staging = self._schema, self._staging
        known = staging.known(schema, self._version())
        survey = self._source.survey(schema.name, known)
        if not survey.files:
            return True
        before = held_rows(self._into, schema, open_table(self._into, schema), survey.journals)
        after = _reached(survey, before)
        self._tell_left_out(survey, before, after)
        # Rows up to these numbers are here; all rows of writers of whom nothing is new.
        here = {one: held.row if one in after else _ALL for one, held in before.items()}
        new = [file for file in survey.files if _is_partly_new(file, here)]
        if new and not self._add(new, here, {one: before[one] for one in after}, after):
            return False
        reached = {one: after.get(one, held).row for one, held in before.items()}
        self._note(reached)
        staging.remember(schema, self._version(), survey.paths)
        return True

    def _add(
        self,
        files: list[SurveyedFile],
        here: dict[str, int],
        before: dict[str, Held],
        after: dict[str, Held],
    ) -> bool:
        schema, staging, report = self._schema, self._staging, self._report
        staging.require_room(schema, files)
        report.wanted_bytes += sum(file.size_bytes for file in files)
        for file in files:
            staging.fetch(schema, file, self._tell)
        placed: list[tuple[SurveyedFile, WrittenFile]] = []
        is_done = False
        try:
            for file in files:
                placed.append((file, staging.place(schema, file, here)))
            written = [one for _, one in placed]
            is_done = commit_gathered(self._into, schema, written, before, after)
        finally:
            if not is_done:
                staging.take_back(schema, placed)
        if not is_done:
            return False
        report.rows[schema.name] += sum(one.rows for one in written)
        staging.clear(schema)
        return True

    def _tell_left_out(
        self, survey: Survey, before: dict[str, Held], after: dict[str, Held]
    ) -> None:
        last = _last_rows(survey)
        left_out = [
            writer_id
            for writer_id, held in before.items()
            if held.gathered and writer_id not in after and last[writer_id] > held.row
        ]
        if left_out:
            self._report.notes.append(
                f"{self._source.place}: later {self._schema.name} of {len(left_out)} processes are "
                f"not gathered (of {left_out[0]}), as a copy of this store was sealed while they "
                "recorded, and gathered: read this store too, with --store"
            )

    def _version(self) -> int:
        table = open_table(self._into, self._schema)
        return -1 if table is None else table.version()

    def _note(self, rows: dict[str, int]) -> None:
        store_id = read_meta(self._into).store_id
        if store_id == self._source.store_id:
            return  # this store itself or a copy: its rows must not pass as being elsewhere
        note = Gathered(str(self._into.root), time.time_ns(), {self._schema.name: rows})
        try:
            self._source.note(store_id, note)
        except OSError as error:
            told = (
                f"{self._source.place}: what was gathered cannot be noted there "
                f"({error.strerror or error}), so prune will not know of it"
            )
            if told not in self._report.notes:
                self._report.notes.append(told)

    def _tell(self, size_bytes: int) -> None:
        self._report.size_bytes += size_bytes
        if self._on_progress is not None:
            self._on_progress(self._report.size_bytes, self._report.wanted_bytes)


def _is_partly_new(file: SurveyedFile, here: dict[str, int]) -> bool:
    return any(high > here[writer_id] for writer_id, (_, high) in file.ranges.items())


def _last_rows(survey: Survey) -> dict[str, int]:
    last: dict[str, int] = {}
    for file in survey.files:
        for writer_id, (_, high) in file.ranges.items():
            last[writer_id] = max(high, last.get(writer_id, high))
    return last


def _reached(survey: Survey, before: dict[str, Held]) -> dict[str, Held]:
    """Return how far the rows of each writer go once they are brought, where any is new."""
    after = {}
    last = _last_rows(survey)
    for writer_id, held in before.items():
        journal = survey.journals[writer_id]
        # Rows may have been pruned here; the number of the journal tells that they were here.
        if last[writer_id] > held.row and (journal > held.journal or journal < 0):
            after[writer_id] = Held(max(journal, held.journal, 0), last[writer_id])
    return after
