"""All upkeep of a store: outcomes folded, small files merged, logs trimmed, old files deleted.

Each step is a commit or a deletion of its own. So this can be stopped or killed at any time, goes
on at the next call, and can run beside recorders, sealers, readers and other compactions.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from localtrace.schema import OUTCOMES, TABLES, TRAJECTORIES, TableSchema
from localtrace.store.compacting.choose import FILE_MAX_BYTES, Group, choose
from localtrace.store.compacting.damaged import UNREADABLE, damaged_files
from localtrace.store.compacting.fold import fold, is_fold_due
from localtrace.store.compacting.rewrite import Rewrite, remove_drafts, rewrite
from localtrace.store.files import exclusive, explained
from localtrace.store.layout import StoreLayout
from localtrace.store.tables.delta import CommittedFile, committed_files, open_table
from localtrace.store.tables.log_files import ENTRY, log_names
from localtrace.store.tables.log_repair import heal_log
from localtrace.store.tables.log_upkeep import ENTRIES_MAX, trim_log
from localtrace.store.tables.replacing import GRACE_HOURS, vacuum

LOCK_NAME = ".compact"
_BUSY = "another compaction is at work on {}: it is already doing this"
_AGAIN = "nothing is lost; free space and run localtrace compact again"
_GROUPS_MAX = 64
"""Groups that one commit replaces, at most."""
_ROUNDS_MAX = 20
"""Merged files may be merged again, so a table is looked at more than once."""

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """Small files that would be merged into one."""

    schema: TableSchema
    files: Group


@dataclass(slots=True)
class CompactReport:
    """The result of one call of `compact`."""

    merged: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))
    """Small files that were merged, by table."""
    made: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TABLES, 0))
    """Files that took their place, by table."""
    folded: int = 0
    """Outcomes that were folded into trajectories, or belong to none yet."""
    old_bytes: int = 0
    new_bytes: int = 0
    vacuumed: int = 0
    vacuumed_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, schema: TableSchema, done: Rewrite) -> None:
        """Count one rewriting."""
        self.merged[schema.name] += len(done.old)
        self.made[schema.name] += len(done.new)
        self.old_bytes += sum(file.size_bytes for file in done.old)
        self.new_bytes += sum(file.size_bytes for file in done.new)


def plan(layout: StoreLayout, everything: bool = True) -> list[Plan]:
    """Return the merges that are due now.

    Args:
        layout: the store.
        everything: those of all small files, and not only those that pay.

    Raises:
        StoreError: a table cannot be opened.
    """
    return [
        Plan(schema, group)
        for schema in TABLES.values()
        for group in choose(schema, committed_files(open_table(layout, schema)), everything)
    ]


@dataclass(frozen=True, slots=True)
class FileCounts:
    """Numbers of a store's files."""

    files: int
    size_bytes: int
    """The bytes of the table files."""
    log_files: int


def count_files(layout: StoreLayout) -> FileCounts:
    """Count the files of all tables' states and logs.

    Raises:
        StoreError: a table cannot be opened.
    """
    found = [
        file for schema in TABLES.values() for file in committed_files(open_table(layout, schema))
    ]
    log_files = sum(len(log_names(layout, schema)) for schema in TABLES.values())
    return FileCounts(len(found), sum(file.size_bytes for file in found), log_files)


def is_due(layout: StoreLayout) -> bool:
    """Tell whether upkeep would pay now.

    Raises:
        StoreError: a table cannot be opened.
    """
    logs = [log_names(layout, schema, ENTRY) for schema in TABLES.values()]
    return (
        max(map(len, logs)) > ENTRIES_MAX
        or is_fold_due(layout)
        or bool(plan(layout, everything=False))
    )


def compact(
    layout: StoreLayout,
    *,
    everything: bool = True,
    grace_hours: int = GRACE_HOURS,
    wait_s: float = 0.0,
    progress: OnProgress | None = None,
) -> CompactReport:
    """Fold outcomes, merge small files, trim logs, and delete files replaced a while ago.

    Args:
        layout: the store.
        everything: merge all small files, and not only those where it pays.
        grace_hours: how long replaced files stay for readers of an earlier state.
        wait_s: how long to wait for another compaction of this store on this host.
        progress: called with small files merged and known.

    Raises:
        StoreBusy: another compaction is at work.
        StoreError: a table cannot be opened.
        OSError: a file cannot be written.
    """
    layout.refuse_bundle()
    report = CompactReport()
    with explained(f"compaction of {layout.root} stopped", _AGAIN):
        layout.tables.mkdir(exist_ok=True)
        # A courtesy: where two run all the same, on two nodes, one of two commits is refused.
        with exclusive(layout.tables / LOCK_NAME, wait_s, _BUSY.format(layout.root)):
            for schema in TABLES.values():
                report.problems += heal_log(layout, schema)
            _fold(layout, everything, report)
            for schema in TABLES.values():
                _merge(layout, schema, everything, report, progress)
                trim_log(layout, schema)
                count, size_bytes = vacuum(layout, schema, grace_hours)
                report.vacuumed += count
                report.vacuumed_bytes += size_bytes
                remove_drafts(layout, schema)
    return report


def _fold(layout: StoreLayout, everything: bool, report: CompactReport) -> None:
    bad: set[str] = set()
    while everything or is_fold_due(layout):
        try:
            folded = fold(layout, everything, bad)
        except UNREADABLE as error:
            damaged = [
                one
                for schema in (OUTCOMES, TRAJECTORIES)
                for one in damaged_files(layout, schema, _readable(layout, schema, bad)).items()
            ]
            if damaged:
                bad.update(file.path for file, _ in damaged)
                report.problems += [said for _, said in damaged]
                continue
            if not isinstance(error, FileNotFoundError):  # else another compaction replaced it
                report.problems.append(
                    f"outcomes are not folded, so that reading joins them: {error}"
                )
            return
        report.folded += folded
        if not folded:
            return


def _readable(
    layout: StoreLayout, schema: TableSchema, bad: Container[str]
) -> Iterator[CommittedFile]:
    """Yield the files of a table but those that are known to be damaged."""
    for file in committed_files(open_table(layout, schema)):
        if file.path not in bad:
            yield file


def _merge(
    layout: StoreLayout,
    schema: TableSchema,
    everything: bool,
    report: CompactReport,
    progress: OnProgress | None,
) -> None:
    bad: set[str] = set()
    for _ in range(_ROUNDS_MAX):
        groups = choose(schema, _readable(layout, schema, bad), everything)
        waiting = sum(map(len, groups))
        for batch in _batches(groups):
            done = _rewrite(layout, schema, batch, bad, report)
            if done is not None:
                report.add(schema, done)
            waiting -= sum(map(len, batch))
            if progress is not None:
                count = sum(report.merged.values())
                progress(count, count + waiting)
            trim_log(layout, schema)
        if not groups:
            return


def _rewrite(
    layout: StoreLayout,
    schema: TableSchema,
    batch: Sequence[Group],
    bad: set[str],
    report: CompactReport,
) -> Rewrite | None:
    try:
        return rewrite(layout, schema, batch)
    except UNREADABLE as error:
        files = [file for group in batch for file in group]
        damaged = damaged_files(layout, schema, files)
        if not damaged and isinstance(error, FileNotFoundError):
            return None  # another compaction replaced and deleted it
        if not damaged and isinstance(error, OSError):
            raise
        bad.update(file.path for file in damaged or files)
        stays = f"table {schema.name}: its small files stay ({error}): run localtrace verify"
        report.problems += damaged.values() or [stays]
        return None


def _batches(groups: Iterable[Group]) -> Iterator[list[Group]]:
    """Gather groups for one commit each: more commits make a log longer."""
    batch: list[Group] = []
    size_bytes = 0
    for group in groups:
        batch.append(group)
        size_bytes += sum(file.size_bytes for file in group)
        if size_bytes >= FILE_MAX_BYTES or len(batch) == _GROUPS_MAX:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
