"""How long after its return a call reaches the journal: what a killed process would lose."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import patch

import localtrace
from localtrace.store.records import Kind
from localtrace.store.writer import Item, JournalSeries
from tests.benchmarks.figures import Figure, Promise, Table
from tests.benchmarks.hot import large_result
from tests.benchmarks.timing import clock_ns, recording

ROUNDS = 3
SECONDS_PER_ROUND = 2.5
BUSY_OPS_PER_S = 3000
IDLE_OPS_PER_S = 100
LARGE_EVERY = 100
_CALLS = (Kind.SPAN, Kind.TURN)
_LARGE = large_result()


@localtrace.op
async def _small(question: str) -> dict[str, Any]:
    return {"answer": question}


@localtrace.op
async def _turn(prompt_ids: list[int]) -> dict[str, Any]:
    return _LARGE


async def _small_only(number: int) -> None:
    await _small("6 * 7")


async def _some_large(number: int) -> None:
    if number % LARGE_EVERY == 0:
        await _turn([number] * 64)
    else:
        await _small("6 * 7")


class _Appends:
    """Notes when the writer's appends return, and how many calls each put into the journal."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, int]] = []
        self._write = JournalSeries.write

    def write(self, series: JournalSeries, batch: list[Item]) -> list[Item]:
        """Stands in for `JournalSeries.write`."""
        written = self._write(series, batch)
        count = sum(item.kind in _CALLS for item in written)
        self.noted.append((clock_ns(), count))
        return written

    def lags_ms(self, returned_ns: list[int]) -> list[float]:
        """The wait of each call, given when each returned; the queue keeps their order."""
        written_ns = [time_ns for time_ns, count in self.noted for _ in range(count)]
        pairs = zip(returned_ns, written_ns, strict=True)
        return [(written - returned) / 1e6 for returned, written in pairs]


async def _busy(call: Callable[[int], Awaitable[None]]) -> list[int]:
    """Call at a fixed rate and compute in between; the loop never waits."""
    returned_ns: list[int] = []
    due_ns = clock_ns()
    for number in range(int(SECONDS_PER_ROUND * BUSY_OPS_PER_S)):
        while clock_ns() < due_ns:
            pass
        await call(number)
        returned_ns.append(clock_ns())
        due_ns += 10**9 // BUSY_OPS_PER_S
    return returned_ns


async def _idle(call: Callable[[int], Awaitable[None]]) -> list[int]:
    """Call now and then, and wait in between."""
    returned_ns: list[int] = []
    for number in range(int(SECONDS_PER_ROUND * IDLE_OPS_PER_S)):
        await asyncio.sleep(1 / IDLE_OPS_PER_S)
        await call(number)
        returned_ns.append(clock_ns())
    return returned_ns


def _one_round(
    loop: Callable[[Callable[[int], Awaitable[None]]], Any], call: Callable[[int], Awaitable[None]]
) -> tuple[float, float, float, float]:
    """Median, 99th percentile and largest lag in ms, and calls per second."""
    appends = _Appends()

    def write(series: JournalSeries, batch: list[Item]) -> list[Item]:
        return appends.write(series, batch)

    with patch.object(JournalSeries, "write", write), recording():
        with localtrace.trajectory(step=1):
            started_ns = clock_ns()
            returned_ns: list[int] = asyncio.run(loop(call))
            duration_s = (clock_ns() - started_ns) / 1e9
        localtrace.flush(60)
    lags = appends.lags_ms(returned_ns)
    percentiles = statistics.quantiles(lags, n=100)
    return percentiles[49], percentiles[98], max(lags), len(lags) / duration_s


def measure() -> Table:
    """Lag from the return of a call to the return of the append that holds it."""
    rows = []
    for name, loop, call in (
        ("idle loop, small calls", _idle, _small_only),
        ("busy loop, small calls", _busy, _small_only),
        (f"busy loop, 1 call in {LARGE_EVERY} large", _busy, _some_large),
    ):
        rounds = [_one_round(loop, call) for _ in range(ROUNDS)]
        median, p99, largest, rate = (Figure(values) for values in zip(*rounds, strict=True))
        verdict = Promise("P2", 50, "ms").verdict(p99)
        rows.append(
            [
                name,
                f"{rate.median:,.0f}/s",
                median.text("ms"),
                p99.text("ms"),
                largest.text("ms"),
                verdict,
            ]
        )
    return Table(
        "Lag from return to journal",
        ("setting", "calls", "median", "99th percentile", "largest", "promise for the 99th"),
        rows,
        (
            f"{ROUNDS} rounds of {SECONDS_PER_ROUND} s (lowest to highest round). Busy: an event "
            "loop that computes in Python and never waits.",
            "Large: 4k ids, 4k logprobs, 16 KiB text.",
        ),
    )
