"""Gathering of many node stores into one, beside reading each of their files once.

`python -m tests.benchmarks.gathering 200` takes as many stores as it is told.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from localtrace.cluster.gather import gather
from localtrace.store.layout import StoreLayout, create_layout
from tests.benchmarks.figures import Figure, Promise, Table
from tests.benchmarks.node_stores import write_node_stores

STORES = (50, 200, 1000)
_WALL = Promise("P10", 60, "s")


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """The CPU time of work, all threads and the kernel included, and the time on the clock."""
    cpu, started_s = os.times(), time.perf_counter()
    work()
    now = os.times()
    return now.user - cpu.user + now.system - cpu.system, time.perf_counter() - started_s


def _read(stores: Sequence[Path]) -> None:
    for store in stores:
        for path in store.glob("tables/**/v*.parquet"):
            with pq.ParquetFile(path) as file:
                file.read(use_threads=False)


def _gather(stores: Sequence[Path], into: StoreLayout) -> None:
    report = gather(stores, into)
    assert report.stores == len(stores), report.problems


def _row(nodes: Sequence[Path], into: Path) -> list[str]:
    layout, count = create_layout(into), len(nodes)
    read_s, _ = _seconds(lambda: _read(nodes))
    first_s, wall_s = _seconds(lambda: _gather(nodes, layout))
    again_s, _ = _seconds(lambda: _gather(nodes, layout))
    per_store = [Figure((seconds * 1000 / count,)) for seconds in (read_s, first_s, again_s)]
    return [
        f"{count:,}",
        per_store[1].text("ms"),
        (per_store[1] / per_store[0]).text("x"),
        per_store[2].text("ms"),
        Figure((wall_s,)).text("s"),
        _WALL.verdict(Figure((wall_s,))) if count == STORES[-1] else "",
    ]


def measure(counts: Sequence[int] = STORES) -> Table:
    """CPU per store, the first time and where nothing is new."""
    with tempfile.TemporaryDirectory(prefix="localtrace-bench-") as folder:
        nodes = write_node_stores(Path(folder), max(counts))
        gather(nodes[:1], create_layout(Path(folder) / "first"))  # imports what it needs
        rows = [_row(nodes[:count], Path(folder) / f"all-{count}") for count in counts]
    return Table(
        "Gathering sealed stores of 80 trajectories and 12 table files each",
        ("stores", "CPU per store", "times reading its files", "again, nothing new", "wall time",
         "promise"),
        rows,
        ("From one process, into a new store on the same disk.",),
    )  # fmt: skip


if __name__ == "__main__":
    print(measure([int(count) for count in sys.argv[1:]] or STORES).plain())
