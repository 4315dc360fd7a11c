"""Helpers for tests of code that records: a recorder in a temporary store, a simulated crash."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import localtrace


@contextlib.contextmanager
def recording(store: Path | None = None, **settings: Any) -> Iterator[Path]:
    """Record for the length of a with block and give the path of the store.

    Args:
        store: its folder; a temporary one, deleted at the end, when not given.
        settings: arguments of `localtrace.init`. Without them nothing is sealed in the background
            and no space is kept free.
    """
    with contextlib.ExitStack() as stack:
        if store is None:
            folder = tempfile.TemporaryDirectory(prefix="localtrace-", ignore_cleanup_errors=True)
            store = Path(stack.enter_context(folder)) / "store"
        localtrace.init(store, **{"seal": False, "min_free_bytes": 0, **settings})
        stack.callback(localtrace.close)
        yield store


def simulate_crash(store: Path, copy: Path) -> Path:
    """Copy a store as it would be found if every process that records into it were killed now.

    No process holds the locks of the copy, so its writers count as dead. What is queued in memory
    is not in it: call `localtrace.flush()` first to have it there.
    """
    return Path(shutil.copytree(store, copy))
