"""Many node stores read as one, beside bare DuckDB over the same files.

`python -m tests.benchmarks.many_stores 1000` takes as many stores as it is told.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time

import duckdb

import localtrace
from tests.benchmarks.figures import Figure, Table
from tests.benchmarks.node_stores import write_node_stores

STORES = (1, 50, 200)
ROUNDS = 3
_SQL = "select step, avg(reward) from {} group by step order by step"
_CALLS = "select count(*) as n from spans where step = 3"


def _cpu_ms(work: Callable[[], object]) -> float:
    """The CPU time of work, of all threads and of the kernel."""
    started_s = process_time()
    work()
    return 1000 * (process_time() - started_s)


def _round(stores: Sequence[Path]) -> list[float]:
    """Opening with a first query, the query again, the calls of a step, and bare DuckDB."""
    opened: list[localtrace.Store] = []

    def ask() -> None:
        opened[0].sql(_SQL.format("trajectories"))

    def start() -> None:
        opened.append(localtrace.open_store(*stores))
        ask()

    times = [_cpu_ms(start), _cpu_ms(ask), _cpu_ms(lambda: opened[0].sql(_CALLS))]
    files = opened[0].files("trajectories")
    opened[0].close()
    with duckdb.connect() as bare:
        sql = _SQL.format("read_parquet($files)")
        bare.execute(sql, {"files": files}).fetchall()
        return [*times, _cpu_ms(lambda: bare.execute(sql, {"files": files}).fetchall())]


def _row(stores: Sequence[Path]) -> list[str]:
    rounds = [_round(stores) for _ in range(ROUNDS)]
    start, again, calls, bare = (Figure(values) for values in zip(*rounds, strict=True))
    return [f"{len(stores):,}", start.text("ms"), again.text("ms"), (again / bare).text("x"),
            calls.text("ms")]  # fmt: skip


def measure(counts: Sequence[int] = STORES) -> Table:
    """CPU of opening them, and of queries."""
    with tempfile.TemporaryDirectory(prefix="localtrace-bench-") as folder:
        nodes = write_node_stores(Path(folder), max(counts))
        _round(nodes[:1])  # imports what it needs
        rows = [_row(nodes[:count]) for count in counts]
    return Table(
        "Sealed stores of 80 trajectories and 12 table files each, read as one",
        ("stores", "open, mean reward by step", "the query again", "to bare DuckDB",
         "calls of a step, at first"),
        rows,
        (
            f"CPU time of all threads, {ROUNDS} rounds (lowest to highest). Bare DuckDB reads the "
            "files of trajectories without their later outcomes.",
        ),
    )  # fmt: skip


if __name__ == "__main__":
    print(measure([int(count) for count in sys.argv[1:]] or STORES).plain())
