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
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from localtrace import child_process
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
_MESSAGE_MAX_CHARS = 2000
_LOWEST_PRIORITY = 19
_ONE_CORE = dict.fromkeys(
    ("OMP_NUM_THREADS", "TOKIO_WORKER_THREADS", "RAYON_NUM_THREADS", "ARROW_IO_THREADS"), "1"
)


class Trouble(msgspec.Struct, frozen=True):
    """Upkeep that fails again and again."""

    times: int
    since: str
    message: str


def troubles(root: Path) -> dict[str, Trouble]:
    """Read which upkeep of a store fails, and why."""
    try:
        return read_json(root / NOTES_NAME, dict[str, Trouble])
    except (OSError, StoreError):
        return {}


def note(root: Path, name: str, message: str | None) -> int:
    """Note in a store that its upkeep failed, or with None that it went well.

    Returns:
        How often it has failed in a row.
    """
    noted = troubles(root)
    before = noted.pop(name, Trouble(0, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", ""))
    times = 0 if message is None else before.times + 1
    if message is not None:
        line = " ".join(message.split())[:_MESSAGE_MAX_CHARS]
        noted[name] = Trouble(times, before.since, line)
    with contextlib.suppress(OSError):
        if not noted:
            (root / NOTES_NAME).unlink(missing_ok=True)
        elif root.is_dir():  # a store that was deleted is not made again
            put_file(root / NOTES_NAME, msgspec.json.encode(noted))
    return times


class _Request(msgspec.Struct):
    """One turn of upkeep."""

    task: str
    root: str
    quota: str | None


class _Answer(msgspec.Struct):
    """How a turn of upkeep ended."""

    state: Literal["done", "busy", "failed"]
    """`busy`: another process, perhaps of another node, is at it."""
    message: str


@dataclass(slots=True)
class _Task:
    """One kind of upkeep."""

    name: str
    rest_s: float = 0.0
    next_at: float = 0.0
    was_last: bool = False
    """Whether it was looked at since there is nothing to seal any more."""

    def is_due(self, now_s: float, *, at_end: bool) -> bool:
        """Tell whether to look now if it pays."""
        due = not self.was_last if at_end else now_s >= self.next_at
        self.was_last = at_end
        return due


class Upkeep:
    """The upkeep of one store, one process after the other."""

    def __init__(self, root: Path, quota: str | None = None) -> None:
        self._root = root
        self._quota = quota
        self._tasks = [_Task(PRUNING, _PRUNING_REST_S), _Task(COMPACTION)]
        self._running: tuple[_Task, subprocess.Popen[bytes], float] | None = None

    def keep(self, *, at_end: bool = False) -> bool:
        """Start what is due where nothing runs; return whether something runs.

        Args:
            at_end: nothing is left to seal. Then nothing rests, and each task gets one more turn.
        """
        if self._running is not None:
            task, process, began_s = self._running
            if process.poll() is None:
                return True
            self._running = None
            crash = _Answer("failed", f"it ended with exit code {process.returncode}")
            now_s = time.monotonic()
            task.next_at = now_s + max(_LOOK_INTERVAL_S, task.rest_s, now_s - began_s)
            self._note(task, child_process.answered(process, _Answer) or crash)
        for task in self._tasks:
            if task.is_due(time.monotonic(), at_end=at_end) and self._start(task):
                return True
        return False

    def _start(self, task: _Task) -> bool:
        task.next_at = time.monotonic() + _LOOK_INTERVAL_S
        request = _Request(task.name, str(self._root), self._quota)
        try:
            if not _pays(request):
                return False
            process = child_process.start(__name__, request, env=os.environ | _ONE_CORE)
        except Exception as error:  # sealing goes on, whatever it is
            self._note(task, _Answer("failed", str(error)))
            return False
        self._running = task, process, time.monotonic()
        return True

    def _note(self, task: _Task, answer: _Answer) -> None:
        level = logging.INFO if answer.state in ("done", "busy") else logging.WARNING
        logger.log(level, "%s %s: %s", task.name, answer.state, answer.message)
        if answer.state == "busy":
            return
        times = note(self._root, task.name, None if answer.state == "done" else answer.message)
        if answer.state == "failed":
            wait_s = min(_RETRY_MAX_S, _LOOK_INTERVAL_S * 2.0 ** min(times - 1, 10))
            task.next_at = max(task.next_at, time.monotonic() + wait_s)
            logger.warning("%s is tried again in %.0f min", task.name, wait_s / 60)


def _pays(request: _Request) -> bool:
    """Tell whether to compact; to prune, as a run has rules, or a limit that has is exceeded."""
    from localtrace.store.compacting.compact import is_due

    layout = open_layout(request.root)
    if request.task == COMPACTION:
        return is_due(layout)
    limit_bytes, retention = parse_quota(request.quota) if request.quota else (0, None)
    is_above = retention is not None and size_of(layout.root) > limit_bytes
    return is_above or any(rules_of_runs(layout))


def _turn(request: _Request) -> _Answer:
    """Do one turn of upkeep."""
    from localtrace.maintain.retention import prune_by_rules
    from localtrace.store.compacting.compact import compact

    root = Path(request.root)
    try:
        if request.task == PRUNING:
            return _Answer("done", prune_by_rules(root, request.quota))
        report = compact(open_layout(root), everything=False)
    except StoreBusy as error:
        return _Answer("busy", str(error))
    except Exception as error:  # the sealer reports it, as no caller could
        return _Answer("failed", str(error) or type(error).__name__)
    if report.problems:
        return _Answer("failed", "; ".join(report.problems))
    merged, made = sum(report.merged.values()), sum(report.made.values())
    return _Answer("done", f"{made} files of {merged}, deleted {report.vacuumed}")


if __name__ == "__main__":
    import pyarrow as pa

    os.nice(_LOWEST_PRIORITY)
    pa.set_cpu_count(1)
    child_process.answer(_turn(child_process.requested(_Request)))
