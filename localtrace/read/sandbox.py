"""Threads that can read all files, but change only those of a temporary folder of their own.

DuckDB runs in them, so that SQL that slips through its checks can do no harm. Where the system has
no Landlock they are ordinary threads.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from localtrace.read.landlock import give_up_writing
from localtrace.store.files import take_lock

T = TypeVar("T")

_PREFIX = "localtrace-query-"
_YOUNG_S = 60.0
"""The age below which a folder is left alone: it may not be locked yet."""
_STOP_S = 2.0


class Sandbox:
    """A private temporary folder, and threads that can change files there and nowhere else."""

    def __init__(self, parent: Path | None = None) -> None:
        """Make the folder, and remove those that killed processes left behind.

        Args:
            parent: the folder to make it in; the system's temporary folder when not given.
        """
        self.folder: Path | None = None
        """The folder; None where none can be made, as on a read-only system."""
        self._descriptor: int | None = None
        self.close: Callable[[], object] = lambda: None
        """Remove the folder."""
        with suppress(OSError):
            parent = parent or Path(tempfile.gettempdir())
            _remove_leftovers(parent)
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
            self.folder, self._descriptor = folder, _opened(folder)
            self.close = weakref.finalize(self, _remove, folder, self._descriptor, os.getpid())
            take_lock(self._descriptor)

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Call `work` in a thread that cannot change other files, and do not wait for it."""
        return self._started(work)[1]

    def run(self, work: Callable[[], T], stop: Callable[[], object] = lambda: None) -> T:
        """Call `work` in a thread that cannot change other files, and return its result.

        Args:
            work: the function to call; its exceptions are raised here.
            stop: called when this thread stops waiting before the work is done, as after Ctrl-C.
        """
        thread, future = self._started(work)
        try:
            return future.result()
        finally:
            if not future.done():
                stop()
            thread.join(_STOP_S)
            del future  # it holds the error, whose traceback holds this frame

    def _started(self, work: Callable[[], T]) -> tuple[threading.Thread, Future[T]]:
        future: Future[T] = Future()
        thread = threading.Thread(
            target=self._work, args=(work, future), name="localtrace-query", daemon=True
        )
        thread.start()
        return thread, future

    def _work(self, work: Callable[[], T], future: Future[T]) -> None:
        try:
            give_up_writing(self._descriptor)
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _remove(folder: Path, descriptor: int, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child the folder is still its parent's
        shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)


def _remove_leftovers(parent: Path) -> None:
    with os.scandir(parent) as entries:
        found = [Path(entry.path) for entry in entries if entry.name.startswith(_PREFIX)]
    for folder in found:
        with suppress(OSError):  # another user's
            _remove_leftover(folder)


def _remove_leftover(folder: Path) -> None:
    descriptor = _opened(folder)
    try:
        held = os.fstat(descriptor)
        is_old = held.st_uid == os.geteuid() and held.st_mtime < time.time() - _YOUNG_S
        if is_old and take_lock(descriptor):  # else its process lives
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
