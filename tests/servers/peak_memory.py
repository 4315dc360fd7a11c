"""Run a command of localtrace and tell its peak memory: `python -m tests.servers.peak_memory …`."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from localtrace.cli import main


def peak_bytes() -> int:
    """The most memory that this process ever held."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux that counts what the starting process held, too.
        (line,) = (one for one in status.read_text().splitlines() if one.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        print(f"PEAK {peak_bytes()}")
