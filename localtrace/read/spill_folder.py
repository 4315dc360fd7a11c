"""A private temporary folder for what a query cannot hold in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from localtrace.store.files import take_lock

_PREFIX = "localtrace-query-"
_YOUNG_S = 60.0
"""The age below which a folder is left alone: it may not be locked yet."""


class SpillFolder:
    """A folder that is removed at `close`, or by the next one if its process was killed."""

    def __init__(self, parent: Path | None = None) -> None:
        """Make the folder, and remove those that killed processes left behind.

        Args:
            parent: the folder to make it in; the system's temporary folder when not given.
        """
        self.path: Path | None = None
        """The folder; None where none can be made, as on a read-only system."""
        self.close: Callable[[], object] = lambda: None
        """Remove the folder."""
        with suppress(OSError):
            parent = parent or Path(tempfile.gettempdir())
            _remove_leftovers(parent)
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
            descriptor = _opened(path)
            self.path = path
            self.close = weakref.finalize(self, _remove, path, descriptor, os.getpid())
            take_lock(descriptor)


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
