"""The longest call that a hostile value makes, and how long other threads wait meanwhile."""

from __future__ import annotations

import gc
import random
import statistics
import threading
import time

import localtrace
from tests.benchmarks.figures import Figure, Promise, Table
from tests.benchmarks.timing import clock_ns, in_fresh_process, recording
from tests.hostile.values import armed, hostile_value

ROUNDS = 3
VALUES = 2000
_TICK_S = 0.001


@localtrace.op
def _same(value: object) -> object:
    return value


def _one_round() -> tuple[float, float, float]:
    """Return the median and the longest CPU time of a call, and the longest wait of a thread."""
    chance = random.Random(7)
    durations_ms: list[float] = []
    waits_ms: list[float] = []
    busy, done = threading.Event(), threading.Event()

    def tick() -> None:
        while not done.is_set():
            busy.wait()
            start_ns = clock_ns()
            time.sleep(_TICK_S)
            if busy.is_set():
                waits_ms.append((clock_ns() - start_ns) / 1e6)

    gc.freeze()  # a collection of all that the tests import takes longer than any call
    ticking = threading.Thread(target=tick)
    ticking.start()
    with recording():
        for _ in range(VALUES):
            value = hostile_value(chance)
            busy.set()
            start_ns = time.thread_time_ns()
            with armed():
                _same(value)
            durations_ms.append((time.thread_time_ns() - start_ns) / 1e6)
            busy.clear()
            del value
    done.set()
    busy.set()
    ticking.join()
    return statistics.median(durations_ms), max(durations_ms), max(waits_ms)


def measure() -> Table:
    """Calls with values that ask to be written out without end, raise, hang or lie."""
    rounds = [in_fresh_process(_one_round) for _ in range(ROUNDS)]
    median, longest, wait = (Figure(values) for values in zip(*rounds, strict=True))
    promise = Promise("P1", 50, "ms")
    return Table(
        "Calls with hostile values",
        ("figure", "time", "promise"),
        [
            ["median call", median.text("ms"), ""],
            ["longest call", longest.text("ms"), promise.verdict(longest)],
            ["longest wait of another thread", wait.text("ms"), promise.verdict(wait)],
        ],
        (
            f"{VALUES} values of tests/hostile/values.py, as argument and as result, in {ROUNDS} "
            "fresh processes (lowest to highest).",
            "Calls: CPU time of their thread, garbage collections of older objects left out. "
            "Waits: of a thread that sleeps 1 ms at a time.",
        ),
    )
