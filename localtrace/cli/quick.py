"""Commands that only look at a store start and end quickly.

Half a second is much for a command that takes a few tenths of one. Only the program itself may do
what is done here; a test that calls a command in its own process, or a library, must not.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType

from localtrace.read.guardian import is_guarded

LOOKING = frozenset(
    {"runs", "ls", "show", "group", "diff", "tail", "stats", "sql", "query", "describe", "files"}
)
"""Names of commands that print something and use no library that works with NumPy."""

_OBJECTS_MAX = 100_000
"""New objects after which Python looks for garbage; what imports make is none."""
_is_quick = False


def start_quickly(command: str | None) -> None:
    """Load the libraries without what they import and such a command does not need.

    pyarrow imports NumPy and cloudpickle if they are installed; NumPy takes longer than all of
    pyarrow. duckdb imports importlib.metadata, for its own version, which takes half as long as all
    of duckdb.
    """
    global _is_quick
    if command not in LOOKING or not is_guarded() or "pyarrow" in sys.modules:
        return
    _is_quick = True
    gc.set_threshold(_OBJECTS_MAX)
    # None: Python takes them for not installed.
    with _in_place_of("numpy", None), _in_place_of("cloudpickle", None):
        import pyarrow as pa  # noqa: F401
    versions = ModuleType("importlib.metadata")
    versions.version = lambda name: "unknown"  # type: ignore[attr-defined]
    with suppress(ImportError), _in_place_of("importlib.metadata", versions):
        import duckdb  # noqa: F401


@contextmanager
def _in_place_of(name: str, module: ModuleType | None) -> Iterator[None]:
    """Let imports find something else under a name, unless the module is there already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = module  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def end_quickly(code: object) -> None:
    """End the process, if it started quickly, without taking its modules apart one by one."""
    if not _is_quick or not isinstance(code, int | None):
        return
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # Python's own end says so
    os._exit(code or 0)
