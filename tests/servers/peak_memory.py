"""Run a command of localtrace and tell its peak memory: `python -m tests.servers.peak_memory …`."""

from __future__ import annotations

import resource
import sys

from localtrace.cli import main


def peak_bytes() -> int:
    """The most memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        print(f"PEAK {peak_bytes()}")
