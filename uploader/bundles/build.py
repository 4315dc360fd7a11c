"""Build a bundle in a working folder beside its final place, and publish it by one rename.

An interrupted build keeps its finished parts, and the same call goes on from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from localtrace.errors import BundleError, ConfigError, QueryError, StoreError
from localtrace.redaction.redaction import Redaction
from localtrace.store.bundle import (
    BUNDLE_VERSION,
    TRACE_IDS_FILE,
    Bag,
    Previous,
    open_bundle,
    part_name,
)
from localtrace.store.files import put_file, sync, take_lock
from localtrace.store.journal.disk import size_of
from localtrace.store.layout import StoreLayout, open_layout
from localtrace.uploader.bundles.bag import make_bag
from localtrace.uploader.bundles.manifest import previous_of
from localtrace.uploader.bundles.payload import Payload, copy_origin
from localtrace.uploader.bundles.rows import Batch, SelectedRows
from localtrace.uploader.bundles.signature import check_key, sign
from localtrace.uploader.selection import Chosen, choose
from localtrace.version import __version__

if TYPE_CHECKING:
    from localtrace.read.store import Store

SPLIT_MIN_BYTES = 2**20
_BATCH_CALLS = 768
"""Largest weight of the trajectories in memory at once; see `Batch.weight`."""
_TEXT_MAX = 2_000
_RESERVED_BYTES = 128 * 2**10
"""Space kept free in a part for the summary, the manifests and the footers of open files."""

Progress = Callable[[int, int], None]
"""Callback that gets the numbers of trajectories done and chosen."""


@dataclass(frozen=True, slots=True)
class Built:
    """A finished bundle."""

    path: Path
    bags: tuple[Bag, ...]
    size_bytes: int
    redactions: Counter[str]
    unsearched: Counter[str]
    """Amount of content that could not be searched for keys, by kind."""
    unknown: list[str]
    """Requested ids that the store does not hold."""

    @property
    def trajectories(self) -> int:
        """Number of trajectories in the bundle."""
        return sum(bag.info.counts["trajectories"] for bag in self.bags)


class _Facts(msgspec.Struct):
    """Facts about a finished part, kept until all parts are finished and its bag can be made."""

    counts: dict[str, int]
    redactions: dict[str, int]
    unsearched: dict[str, int]


class _Plan(msgspec.Struct, frozen=True):
    """Everything that decides a bundle's bytes. A build never reuses parts of another plan."""

    version: str
    format_version: int
    store_id: str
    selection: str
    trace_ids: str
    """sha256 of all ids in order."""
    counts: dict[str, int]
    left_out: dict[str, int]
    rules: str
    split_bytes: int | None
    sequence: int
    previous: Previous | None


def build_bundle(
    store: Store,
    chosen: Chosen,
    out: Path,
    *,
    split_bytes: int | None = None,
    key: Path | None = None,
    redact: Path | None = None,
    after: Path | None = None,
    on_progress: Progress = lambda done, total: None,
) -> Built:
    """Write chosen trajectories as a bundle, with all metrics and facts of their runs.

    To go on after an interruption, repeat the same call. Finished parts are kept.

    Args:
        chosen: a `Selection`, `Filters`, an SQL query with a column `trace_id`, or trace ids.
        out: the folder of the bundle, which appears when it is complete.
        split_bytes: largest size of a part; `out` then holds the parts `001`, `002`, ….
        key: an ssh key to sign with.
        redact: a file of redaction rules, added to the built-in rules.
        after: the bundle that this one continues.

    Raises:
        QueryError: the selection cannot be read, or is empty.
        ConfigError: an argument cannot be used, or several stores are read as one.
        StoreError: the bundle cannot be written, or another one is in its place.
    """
    _refuse_unusable(store, split_bytes, key)
    redaction = Redaction.load(redact)
    choice = choose(store, chosen)
    rows = SelectedRows(store, redaction, choice.trace_ids)
    if not rows.trace_ids:
        raise QueryError(f"nothing to bundle: no trajectory is chosen by {choice.text}")
    plan = _plan(store, rows, redaction, choice.text, split_bytes, after)
    build = _Build(open_layout(store.path), rows, plan, out.absolute(), on_progress)
    try:
        build.run(key)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"cannot write {out} ({error.strerror or error}): fix that and rerun; "
            "finished parts are kept"
        ) from error
    return _built(build, choice.unknown)


def _refuse_unusable(store: Store, split_bytes: int | None, key: Path | None) -> None:
    if split_bytes is not None and split_bytes < SPLIT_MIN_BYTES:
        raise ConfigError(f"parts of {split_bytes} bytes are too small: say 1MiB or more")
    if len(store.paths) > 1 or store.store_id is None:
        raise ConfigError("a bundle is made of one store, whose id it carries: name only that one")
    if key is not None:
        check_key(key)


def _plan(
    store: Store,
    rows: SelectedRows,
    redaction: Redaction,
    selection: str,
    split_bytes: int | None,
    after: Path | None,
) -> _Plan:
    sequence, previous = _continued(after)
    return _Plan(
        version=__version__,
        format_version=BUNDLE_VERSION,
        store_id=store.store_id or "",
        selection=redaction.text(selection[:_TEXT_MAX]),
        trace_ids=hashlib.sha256("\n".join(rows.trace_ids).encode()).hexdigest(),
        counts=rows.counts(),
        left_out=rows.left_out(),
        rules=redaction.digest,
        split_bytes=split_bytes,
        sequence=sequence,
        previous=previous,
    )


def _built(build: _Build, unknown: list[str]) -> Built:
    bags, of_runs = open_bundle(build.out), build.run_redactions
    # Every part counts the redactions in the rows of runs, which all parts hold: once is enough.
    redactions = sum((Counter(bag.info.redactions) - of_runs for bag in bags), of_runs)
    unsearched = sum((Counter(bag.info.unsearched) for bag in bags), Counter[str]())
    return Built(build.out, bags, size_of(build.out), redactions, unsearched, unknown)


def _continued(after: Path | None) -> tuple[int, Previous | None]:
    if after is None:
        return 1, None
    bags = open_bundle(after.absolute())
    if not bags:
        raise BundleError(f"{after}: is not a bundle: name the one that this one continues")
    return bags[-1].info.sequence + 1, previous_of(bags[-1])


class _Build:
    """One bundle being built in its working folder `.NAME.partial`."""

    def __init__(
        self,
        layout: StoreLayout,
        rows: SelectedRows,
        plan: _Plan,
        out: Path,
        on_progress: Progress,
    ) -> None:
        self.out = out
        self._layout = layout
        self._rows = rows
        self._plan = plan
        self._work = out.with_name(f".{out.name}.partial")
        self._parts = self._work / "parts"
        self._on_progress = on_progress
        self._of_runs, self.run_redactions = rows.of_runs()
        self._reserved_bytes = _RESERVED_BYTES + 300 * len(rows.run_ids)

    def run(self, key: Path | None) -> None:
        """Make the missing parts, turn all parts into bags, and move them to `out`."""
        there = StoreError(f"{self.out} exists: name another folder, or move it away")
        if os.path.lexists(self.out) and not self._work.exists():
            raise there
        with self._claimed():
            if not os.path.lexists(self.out):
                start = self._resume()
                while start < len(self._rows.trace_ids):
                    start = self._make_part(start)
                self._make_bags(key)
                self._publish()
            elif self._finished():
                raise there
            shutil.rmtree(self._work)

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[None]:
        """Lock the working folder, and refuse parts in it that belong to another plan."""
        self._parts.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._work, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not take_lock(descriptor):
                raise StoreError(f"another process is building {self.out}: wait for it")
            note, plan = self._work / "plan.json", msgspec.json.encode(self._plan)
            if note.exists() and note.read_bytes() != plan:
                raise StoreError(
                    f"{self._work} holds an unfinished bundle of another selection, or of the "
                    "store as it was: remove that folder, or name another --out"
                )
            if not note.exists():
                put_file(note, plan)
            yield
        finally:
            os.close(descriptor)

    def _resume(self) -> int:
        """Return how many trajectories are in parts that an earlier call finished."""
        start = 0
        for part in self._finished():
            ids = (part / "data" / TRACE_IDS_FILE).read_text("utf-8").split()
            start += len(ids)
        self._on_progress(start, len(self._rows.trace_ids))
        return start

    def _finished(self) -> list[Path]:
        names = [name for name in os.listdir(self._parts) if name.isdecimal()]
        return [self._parts / name for name in sorted(names, key=int)]

    def _make_part(self, start: int) -> int:
        """Make the next part; return the index of the first trajectory after it."""
        limit = self._plan.split_bytes
        draft, budget = self._work / "draft", limit
        while True:
            if draft.exists():
                shutil.rmtree(draft)
            payload = self._fill(draft / "data", start, budget)
            size_bytes = size_of(draft) + self._reserved_bytes
            if limit is None or budget is None or size_bytes <= limit:
                break
            if len(payload.trace_ids) == 1:
                raise ConfigError(
                    f"trajectory {payload.trace_ids[0]} needs {size_bytes} bytes with its run: "
                    "choose a larger size for the parts"
                )
            budget = int(budget * 0.9)
        part = self._parts / part_name(len(self._finished()) + 1)
        redactions = payload.redactions + self.run_redactions
        facts = _Facts(payload.counts, redactions, payload.unsearched)
        put_file(self._facts(part), msgspec.json.encode(facts))
        sync(draft)
        os.replace(draft, part)
        sync(self._parts)
        return start + len(payload.trace_ids)

    def _facts(self, part: Path) -> Path:
        return self._work / f"{part.name}.json"

    def _fill(self, folder: Path, start: int, budget: int | None) -> Payload:
        payload = Payload(folder, self._of_runs)
        copy_origin(self._layout, self._rows.run_ids, folder)
        total, end, calls = len(self._rows.trace_ids), start, _BATCH_CALLS
        while end < total:
            batch = self._rows.batch_at(end, calls)
            if budget is not None and not self._fits(payload, batch, budget):
                if len(batch.trace_ids) > 1:
                    calls = batch.weight // 2
                    continue
                if end > start:
                    break
            payload.add(batch)
            end += len(batch.trace_ids)
            self._on_progress(end, total)
        payload.close()
        return payload

    def _fits(self, payload: Payload, batch: Batch, budget: int) -> bool:
        if payload.size_with(batch) + self._reserved_bytes <= budget:
            return True
        payload.flush()  # measures how well the rows compress, which improves the estimate
        return payload.size_with(batch) + self._reserved_bytes <= budget

    def _make_bags(self, key: Path | None) -> None:
        plan, previous = self._plan, self._plan.previous
        series_id = hashlib.sha256(msgspec.json.encode(plan)).hexdigest()
        folders = self._finished()
        for number, root in enumerate(folders):
            facts = msgspec.json.decode(self._facts(root).read_bytes(), type=_Facts)
            bag = make_bag(
                root,
                {
                    "series_id": series_id,
                    "part": number + 1,
                    "parts": len(folders),
                    "sequence": plan.sequence + number,
                    "previous": previous,
                    "store_id": plan.store_id,
                    "selection": plan.selection,
                    "counts": facts.counts,
                    "redactions": facts.redactions,
                    "left_out": plan.left_out,
                    "unsearched": facts.unsearched,
                },
            )
            if key is not None:
                sign(root, key)
            previous = previous_of(bag)

    def _publish(self) -> None:
        whole = self._parts if self._plan.split_bytes is not None else self._finished()[0]
        os.rename(whole, self.out)
        sync(self.out.parent)
