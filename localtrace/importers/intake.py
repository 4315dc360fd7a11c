"""The writing side of an import: new records go into the store, known ones are counted.

Records go through the recorder of this process. Unlike a rollout, an import waits for the disk, and
it seals what it wrote. Because ids are derived from the source, a repeated import finds by id what
an earlier one wrote.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from localtrace.errors import ConfigError, StoreError, StoreNotFound
from localtrace.importers.imported_rollouts import (
    OutcomeIn,
    Rollout,
    call_item,
    end_item,
    outcome_item,
    turn_totals,
)
from localtrace.importers.known import Known
from localtrace.record import active, session
from localtrace.record.config import check_folder_name
from localtrace.record.losses import REMEDIES
from localtrace.record.recorder import Recorder
from localtrace.redaction.facts import name_without_secrets
from localtrace.store.journal.writer import Item
from localtrace.store.layout import open_layout
from localtrace.store.sealing.seal import seal

_BATCH_MAX = 1024
_BATCH_MAX_BYTES = 16 * 2**20
"""Bytes read, or bytes of records, between two waits for the disk."""
_REMEMBERED_MAX = 65_536
"""Ids of calls and trajectories kept in memory until the store is read again."""
_UNSEALED_MAX_BYTES = 96 * 2**20
"""Bytes of records between two seals: sealing takes several times as much memory."""
_PROBLEMS_MAX = 100
_LATE = "counts of turns and tokens: the trajectories were there before these calls of theirs"
_STALL_MAX_S = 60.0
_SEALER_WAIT_S = 60.0

New = TypeVar("New")
Progress = Callable[[int, int], None]
"""A function that is called with the counts of journals done and journals ready."""


@dataclass(slots=True)
class Report:
    """Counts of what an import did, or would do."""

    trajectories: int = 0
    calls: int = 0
    outcomes: int = 0
    known: int = 0
    """Trajectories that were skipped because the store holds them."""
    bad: int = 0
    """Lines that could not be imported."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Entries that are not rollouts, counted by kind."""
    problems: list[str] = field(default_factory=list)
    """The first bad lines, and problems that sealing found."""

    def refuse(self, place: str, reason: str) -> None:
        """Count a bad line, and keep its place and the reason among the problems."""
        self.bad += 1
        if len(self.problems) < _PROBLEMS_MAX:
            self.problems.append(f"{place}: {reason}")


class Intake:
    """One import into a store, one run after the other.

    Args:
        store: the folder of the store; created when there is something to write.
        dry_run: count only, write nothing.
    """

    def __init__(self, store: Path, *, dry_run: bool = False) -> None:
        if active.recorder is not None:
            raise ConfigError("this process records already: import in another one")
        self.report = Report()
        self._path = store
        self._dry_run = dry_run
        if not dry_run:
            # Journals of an interrupted import become tables, which `Known` reads in little memory.
            self._seal()
        self._known = Known(store)
        self._recent: set[tuple[str | int, ...]] = set()
        """Trace ids, and keys of calls and outcomes, added since `Known` last read the store."""
        self._unsealed_bytes = 0
        self._waiting_bytes = 0
        self._run: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._known.close()
        if not session.close(_STALL_MAX_S) and error is None:
            raise StoreError(f"not everything was written to {self._path}: repeat the import")

    def begin_run(
        self, run_id: str, *, project: str | None, experiment: str | None, config: Any = None
    ) -> None:
        """Set the run of what follows; the run is written together with its first record.

        Raises:
            ConfigError: its id, project or experiment cannot be recorded.
        """
        self._close_run()
        for name in (run_id, project or "", experiment or ""):
            try:
                check_folder_name(name)
            except ValueError as error:
                raise ConfigError(f"{name[:80]!r} cannot be a name ({error})") from None
        self._run = {
            "run_id": name_without_secrets(run_id),
            "project": project and name_without_secrets(project),
            "experiment": experiment and name_without_secrets(experiment),
            "config": config,
        }

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Write the trajectories that the store does not hold.

        Raises:
            StoreError: the disk does not accept them.
        """
        for batch in _batches(rollouts):
            self._add_batch(batch)
            batch.clear()  # a single trajectory may be large, so it is gone before the next is read

    def finish(self, progress: Progress) -> None:
        """Seal what was written."""
        self._close_run()
        if not self._dry_run:
            self._seal(progress)

    def _add_batch(self, batch: list[Rollout]) -> None:
        if len(self._recent) > _REMEMBERED_MAX or self._unsealed_bytes > _UNSEALED_MAX_BYTES:
            self._look_again()
        rows = self._known.trajectories({one.trace_id for one in batch})
        # A trajectory of another run is known whole. One of this run, or without a row, may be
        # there in part: an import was interrupted, or a request id was used twice.
        open_ids = {one.trace_id for one in batch} - {
            trace_id for trace_id, row in rows.items() if row.run_id != self._run["run_id"]
        }
        # The step may have been read from elsewhere than before.
        steps = {one.step for one in batch} | {row.step for row in rows.values()}
        late = {
            one.trace_id for one in batch
            if one.trace_id in rows and rows[one.trace_id].reward is None
            and isinstance(one.values.get("reward"), int | float)
        }  # fmt: skip
        given = {one.trace_id for one in batch if one.outcomes}
        outcomes = self._known.outcomes(open_ids & (given | late))
        late -= {trace_id for trace_id, name, *_ in outcomes if name == "reward"}
        spans = self._known.spans(open_ids, {step for step in steps if step is not None})
        known = {*spans, *outcomes}
        for one in batch:
            if one.trace_id in late:
                one = _with_late_reward(one)
            if one.trace_id in open_ids:
                self._add_one(one, one.trace_id in rows, known)
            else:
                self.report.known += 1
        self._wait()

    def _add_one(self, one: Rollout, is_known: bool, known: set[tuple[Any, ...]]) -> None:
        if is_known and one.is_export:
            self.report.known += 1
            return
        has_row = is_known or one.is_carried or (one.trace_id,) in self._recent
        calls = self._new(
            known, {(one.trace_id, f"{call.span_id:016x}"): call for call in one.calls}
        )
        outcomes = self._new(known, {(one.trace_id, *said.key): said for said in one.outcomes})
        self._recent.add((one.trace_id,))
        if has_row and not calls and not outcomes:
            self.report.known += 1
            return
        self.report.trajectories += not has_row
        self.report.calls += len(calls)
        self.report.outcomes += len(outcomes)
        self.report.left_out[_LATE] += has_row and bool(calls) and not one.is_carried
        if self._dry_run:
            return
        recorder = self._recorder()
        # The writer counts the turns of a trajectory only if it gets all calls, and then the end.
        is_whole = not has_row and len(calls) == len(one.calls)
        shown = one if is_whole else replace(one, is_carried=True)
        for call in calls:
            self._put(call_item(recorder, shown, call))
        for outcome in outcomes:
            self._put(outcome_item(recorder, one, outcome))
        if not has_row:
            self._put(end_item(recorder, one, None if is_whole else turn_totals(recorder, one)))

    def _new(self, known: set[tuple[Any, ...]], keyed: dict[tuple[Any, ...], New]) -> list[New]:
        """Return what neither the store nor this import has yet, and remember it."""
        found = [one for key, one in keyed.items() if key not in known and key not in self._recent]
        self._recent.update(keyed)
        return found

    def _recorder(self) -> Recorder:
        if active.recorder is None:
            # What waits is limited here, so the recorder's own limit, a setting, must drop nothing.
            session.init(
                self._path, **self._run, attempt=0, seal=False, queue_max_bytes=sys.maxsize
            )
        assert active.recorder is not None
        return active.recorder

    def _put(self, item: Item) -> None:
        """Hand a record over; the calls of one long rollout repeat its messages, so they may wait.

        Raises:
            StoreError: the disk does not accept them.
        """
        self._recorder().put(item)
        self._unsealed_bytes += len(item.record)
        # Small records take memory too: a batch has at most as many of them as rollouts.
        self._waiting_bytes += len(item.record) + _BATCH_MAX_BYTES // _BATCH_MAX
        if self._waiting_bytes >= _BATCH_MAX_BYTES:
            self._wait()

    def _wait(self) -> None:
        """Wait until everything is in the journal; a rollout would drop records instead."""
        if (recorder := active.recorder) is None:
            return
        self._waiting_bytes = 0
        deadline_s = time.monotonic() + _STALL_MAX_S
        while not recorder.flush(1.0) and recorder.paused is None:
            if time.monotonic() > deadline_s:
                raise StoreError(f"the disk of {self._path} does not respond: repeat the import")
        reason = recorder.paused or next(iter(recorder.losses.records), None)
        if reason is not None:
            remedy = REMEDIES.get(reason, reason)
            raise StoreError(f"cannot write to {self._path}: {remedy}; then repeat the import")

    def _look_again(self) -> None:
        if not self._dry_run:
            self._seal()
            self._known.look()
        self._recent.clear()
        self._unsealed_bytes = 0

    def _close_run(self) -> None:
        if active.recorder is not None and not session.close(_STALL_MAX_S):
            raise StoreError(f"not everything was written to {self._path}: repeat the import")

    def _seal(self, progress: Progress | None = None) -> None:
        try:
            layout = open_layout(self._path)
        except StoreNotFound:
            return
        report = seal(layout, wait_s=_SEALER_WAIT_S, progress=progress)
        self.report.problems += report.problems


def _with_late_reward(one: Rollout) -> Rollout:
    """Return a rollout with its reward as an outcome: what a trajectory ended with is written."""
    end_ns = one.start_ns + one.duration_ns
    reward = OutcomeIn("reward", one.values["reward"], end_ns, one.step, "import")
    return replace(one, outcomes=(*one.outcomes, reward))


def _batches(rollouts: Iterable[Rollout]) -> Iterator[list[Rollout]]:
    batch: list[Rollout] = []
    size_bytes = 0
    for one in rollouts:
        batch.append(one)
        size_bytes += one.size_bytes
        if len(batch) >= _BATCH_MAX or size_bytes >= _BATCH_MAX_BYTES:
            del one
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
