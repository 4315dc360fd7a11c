"""Stores on ordinary and on very small disks; nothing that a test starts outlives it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import localtrace
from tests.environment import unavailable


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """Where a test may record; whatever still records there at the end is closed."""
    yield tmp_path / "store"
    localtrace.close(timeout_s=1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB of its own."""
    yield from _mounted(tmp_path / "disk", "size=8m")


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that cannot be written."""
    yield from _mounted(tmp_path / "read-only", "ro,size=1m")


def _mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        unavailable("a small disk cannot be mounted here")
    try:
        yield folder
    finally:
        localtrace.close(timeout_s=1)
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
