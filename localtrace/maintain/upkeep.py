"""Upkeep beside sealing: pruning and compaction, in processes that the sealer starts.

One runs at a time, at the lowest priority, and rests as long as it worked. It works on one core,
but for the query that chooses what to prune. Its end gives back its memory, 1 GB at most. Sealing
goes on meanwhile and waits for none of it. What fails is tried again after one, two, four
minutes, an hour at most, and `upkeep.json` says why until it goes well. `localtrace compact` and
`localtrace prune` do the same by hand.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from localtrace.errors import StoreBusy, StoreError
from localtrace.store.files import put_file, read_json
from localtrace.store.journal.disk import size_of
from localtrace.store.layout import open_layout
from localtrace.store.retention_rules import parse_quota, rules_of_runs

logger = logging.getLogger("localtrace.sealer")

NOTES_NAME = "upkeep.json"
COMPACTION, PRUNING = "compaction", "pruning"
_LOOK_INTERVAL_S = 60.0
_PRUNING_REST_S = 300.0
_RETRY_MAX_S = 3600.0
_SAID_MAX = 2000
_LOWEST_PRIORITY = 19
_PARTLY = 3
"""The exit code of upkeep that did all that can be done: to wait longer would help nothing."""
_BUSY = 4
"""The exit code of upkeep that another process, perhaps of another node, is at already."""
_ONE_CORE = dict.fromkeys(
    ("OMP_NUM_THREADS", "TOKIO_WORKER_THREADS", "RAYON_NUM_THREADS", "ARROW_IO_THREADS"), "1"
)


class Trouble(msgspec.Struct, frozen=True):
    """Upkeep that fails again and again."""

    times: int
    since: str
    said: str


def troubles(root: Path) -> dict[str, Trouble]:
    """Read which upkeep of a store fails, and why."""
    try:
        return read_json(root / NOTES_NAME, dict[str, Trouble])
    except (OSError, StoreError):
        return {}


def note(root: Path, name: str, said: str | None) -> int:
    """Note in a store that its upkeep failed, or with None that it went well.

    Returns:
        How often it has failed in a row.
    """
    noted = troubles(root)
    before = noted.pop(name, Trouble(0, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", ""))
    times = 0 if said is None else before.times + 1
    if said is not None:
        noted[name] = Trouble(times, before.since, said[-_SAID_MAX:])
    with contextlib.suppress(OSError):
        if not noted:
            (root / NOTES_NAME).unlink(missing_ok=True)
        elif root.is_dir():  # a store that was deleted is not made again
            put_file(root / NOTES_NAME, msgspec.json.encode(noted))
    return times


@dataclass(slots=True)
class _Task:
    """One kind of upkeep."""

    name: str
    arguments: list[str]
    pays: Callable[[], bool]
    rest_s: float = 0.0
    next_at: float = 0.0
    was_last: bool = False
    """Whether it was looked at since there is nothing to seal any more."""

    def is_due(self, now_s: float, *, at_end: bool) -> bool:
        """Tell whether to look now if it pays."""
        due = not self.was_last if at_end else now_s >= self.next_at
        self.was_last = at_end
        return due


@dataclass(frozen=True, slots=True)
class _Running:
    """A process that does a task."""

    task: _Task
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    began_s: float


class Upkeep:
    """The upkeep of one store, one process after the other."""

    def __init__(self, root: Path, quota: str | None = None) -> None:
        self._root = root
        self._running: _Running | None = None
        pays = partial(_pruning_pays, root, quota)
        self._tasks = [
            _Task(PRUNING, [str(root), quota or ""], pays, _PRUNING_REST_S),
            _Task(COMPACTION, [str(root)], partial(_compaction_pays, root)),
        ]

    def keep(self, *, at_end: bool = False) -> bool:
        """Start what is due where nothing runs; return whether something runs.

        Args:
            at_end: nothing is left to seal. Then nothing rests, and each task gets one more turn.
        """
        if self._running is not None:
            if self._running.process.poll() is None:
                return True
            self._end(self._running)
        for task in self._tasks:
            if task.is_due(time.monotonic(), at_end=at_end) and self._start(task):
                return True
        return False

    def _start(self, task: _Task) -> bool:
        task.next_at = time.monotonic() + _LOOK_INTERVAL_S
        try:
            if not task.pays():
                return False
            output = tempfile.TemporaryFile()  # noqa: SIM115, it is closed with the process
            process = subprocess.Popen(
                [sys.executable, "-m", "localtrace.maintain.upkeep", task.name, *task.arguments],
                env=os.environ | _ONE_CORE,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        except Exception as error:  # sealing goes on, whatever it is
            self._failed(task, str(error))
            return False
        self._running = _Running(task, process, output, time.monotonic())
        return True

    def _end(self, ended: _Running) -> None:
        self._running = None
        with ended.output as output:
            output.seek(-min(output.seek(0, os.SEEK_END), _SAID_MAX), os.SEEK_END)
            said = output.read().decode("utf-8", "replace").strip()
        task, now_s = ended.task, time.monotonic()
        task.next_at = now_s + max(_LOOK_INTERVAL_S, task.rest_s, now_s - ended.began_s)
        said = said.rpartition("\n")[2]
        if ended.process.returncode == _BUSY:
            logger.info("%s: %s", task.name, said)
        elif ended.process.returncode == _PARTLY:
            note(self._root, task.name, said)
            logger.warning("%s did what it could: %s", task.name, said)
        elif ended.process.returncode:
            self._failed(task, said)
        else:
            note(self._root, task.name, None)
            logger.info("%s: %s", task.name, said)

    def _failed(self, task: _Task, said: str) -> None:
        times = note(self._root, task.name, said)
        wait_s = min(_RETRY_MAX_S, _LOOK_INTERVAL_S * 2.0 ** min(times - 1, 10))
        task.next_at = max(task.next_at, time.monotonic() + wait_s)
        logger.warning(
            "%s failed %d times, next try in %.0f min: %s", task.name, times, wait_s / 60, said
        )


def _compaction_pays(root: Path) -> bool:
    from localtrace.store.compacting.compact import is_due

    return is_due(open_layout(root))


def _pruning_pays(root: Path, quota: str | None) -> bool:
    """Tell whether a run has rules, or the store is above a limit that has rules."""
    limit_bytes, retention = parse_quota(quota) if quota else (0, None)
    is_above = retention is not None and size_of(root) > limit_bytes
    return is_above or any(rules_of_runs(open_layout(root)))


def compact_once(root: Path) -> int:
    """Compact a store where it pays, and print what was done; return the exit code."""
    from localtrace.store.compacting.compact import compact

    report = compact(open_layout(root), everything=False)
    merged, made = sum(report.merged.values()), sum(report.made.values())
    print(f"{made} files of {merged}, deleted {report.vacuumed}")
    for problem in report.problems:
        print(" ".join(problem.split()))  # the last line is what is noted
    return 1 if report.problems else 0


def main(name: str, root: Path, quota: str = "") -> int:
    """Do one task of upkeep, and print what was done; return the exit code."""
    import pyarrow as pa

    from localtrace.maintain.retention import PartlyPruned, prune_by_rules

    os.nice(_LOWEST_PRIORITY)
    pa.set_cpu_count(1)
    try:
        if name == COMPACTION:
            return compact_once(root)
        print(prune_by_rules(root, quota))
    except (PartlyPruned, StoreBusy) as error:
        print(" ".join(str(error).split()))  # the last line is what is noted
        return _BUSY if isinstance(error, StoreBusy) else _PARTLY
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
