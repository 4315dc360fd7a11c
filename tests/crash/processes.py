"""Child processes that a test starts, kills and always ends."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
"""Against hanging; nothing here is expected to take that long."""
_CODE = """
import importlib, json, sys
module, name, arguments = json.loads(sys.argv[1])
getattr(importlib.import_module(module), name)(*arguments)
"""
Child = subprocess.Popen[str]


@contextlib.contextmanager
def child(
    work: Callable[..., object], *arguments: object, environ: dict[str, str] | None = None
) -> Iterator[Child]:
    """Run a function of some module in a fresh Python; kill it at the end if it still runs."""
    call = [work.__module__, work.__qualname__, [_plain(argument) for argument in arguments]]
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE, json.dumps(call)],
        cwd=ROOT,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def run_child(work: Callable[..., object], *arguments: object, limit_s: float = LIMIT_S) -> str:
    """Run a function to its end, which must be a good one; what it printed."""
    with child(work, *arguments) as process:
        output, _ = process.communicate(timeout=limit_s)
        assert process.returncode == 0
        return output


def wait_until(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Wait for something that other threads or processes bring about."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def _plain(argument: object) -> object:
    return str(argument) if isinstance(argument, Path) else argument
