"""Disks small enough to be filled."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.environment import unavailable


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A disk of its own in a new folder, in memory."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        unavailable("a small disk cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(file: Path, leave_bytes: int = 0) -> None:
    """Take the space of a disk, as a checkpoint would; delete the file to have it back."""
    with file.open("wb", buffering=0) as checkpoint:
        with contextlib.suppress(OSError):
            while True:
                checkpoint.write(bytes(4096))
        checkpoint.truncate(max(0, checkpoint.tell() - leave_bytes))
