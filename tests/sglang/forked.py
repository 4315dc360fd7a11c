"""SGLang's processes as forks of one that has imported it, which takes ten seconds of CPU."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

_MODULES = ("sglang.srt.entrypoints.http_server", "sglang.srt.models.registry")
"""They import all that SGLang's processes need."""


def fork_processes() -> None:
    """Have SGLang fork its processes instead of spawning them."""
    original = multiprocessing.set_start_method

    def set_start_method(method: str, force: bool = False) -> None:
        original("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = set_start_method


def import_all() -> None:
    """Import what SGLang's processes import."""
    for name in _MODULES:
        importlib.import_module(name)


def serve(arguments: list[str], environ: Mapping[str, str], log: Path) -> None:
    """Run `python -m sglang.launch_server` in this process."""
    os.setsid()
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.update(environ)
    sys.argv[1:] = arguments
    runpy.run_module("sglang.launch_server", run_name="__main__")
