"""What a traced call adds to the bare call, and to one encoding of what it carries."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

import localtrace
from tests.benchmarks.figures import Figure, Promise, Table
from tests.benchmarks.timing import (
    PACE_S,
    clock_ns,
    in_fresh_process,
    median_us,
    recording,
)

ROUNDS = 7
CALLS_PER_ROUND = 150
_encode_into = msgspec.msgpack.Encoder().encode_into


async def _nothing() -> None:
    pass


async def _tiny(question: str, temperature: float) -> dict[str, Any]:
    return {"answer": question, "correct": True}


def large_result() -> dict[str, Any]:
    """4,096 token ids, as many logprobs, and 16 KiB of text."""
    chance = random.Random(0)
    return {
        "output_ids": [chance.randrange(150_000) for _ in range(4096)],
        "output_logprobs": [-chance.expovariate(2.0) for _ in range(4096)],
        "text": "".join(chance.choices("abcdefghijklmnopqrstuvwxyz ", k=16 * 1024)),
        "finish_reason": "stop",
    }


_LARGE = large_result()


async def _large(prompt_ids: list[int]) -> dict[str, Any]:
    return _LARGE


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    function: Callable[..., Awaitable[Any]]
    arguments: dict[str, Any]
    result: Any
    promise: Promise | None = None
    """Held against the added time, or for a payload against the multiple of one encoding."""


_CASES = (
    _Case("nothing", _nothing, {}, None, Promise("P1", 5, "µs")),
    _Case(
        "tiny",
        _tiny,
        {"question": "6 * 7", "temperature": 1.0},
        {"answer": "6 * 7", "correct": True},
    ),
    _Case(
        "4k ids, 4k logprobs, 16 KiB text",
        _large,
        {"prompt_ids": list(range(64))},
        _LARGE,
        Promise("P1", 2, "encodings"),
    ),
)
_ROWS = tuple(
    (setting, gap_s, case)
    for setting, gap_s in (("paced", PACE_S), ("flooded", None))
    for case in _CASES
)


async def _medians(case: _Case, gap_s: float | None, calls: int) -> tuple[float, float, float]:
    """In µs, of the bare call, one encoding and the traced call, made in turn."""
    traced = localtrace.op(case.function)
    payload = (case.arguments, case.result)
    buffer = bytearray(2**18)
    bare_ns: list[int] = []
    encoding_ns: list[int] = []
    traced_ns: list[int] = []

    async def call(function: Callable[..., Awaitable[Any]], durations_ns: list[int]) -> None:
        start_ns = clock_ns()
        await function(**case.arguments)
        durations_ns.append(clock_ns() - start_ns)

    async def encode() -> None:
        start_ns = clock_ns()
        _encode_into(payload, buffer)
        encoding_ns.append(clock_ns() - start_ns)

    for _ in range(calls):
        for work in (call(case.function, bare_ns), encode(), call(traced, traced_ns)):
            if gap_s is not None:
                await asyncio.sleep(gap_s)
            await work
    return median_us(bare_ns), median_us(encoding_ns), median_us(traced_ns)


async def _all_rows(calls: int) -> list[tuple[float, float, float]]:
    medians = []
    for number, (_, gap_s, case) in enumerate(_ROWS):
        with localtrace.trajectory(step=1, sample_index=number):
            medians.append(await _medians(case, gap_s, calls))
        localtrace.flush(60)
    return medians


def _one_round() -> list[tuple[float, float, float]]:
    with recording():
        asyncio.run(_all_rows(calls=20))
        return asyncio.run(_all_rows(CALLS_PER_ROUND))


def measure() -> Table:
    """Cost of a traced call, with 1 ms before each call and with no pause at all."""
    rounds = [in_fresh_process(_one_round) for _ in range(ROUNDS)]
    rows = []
    for (setting, _, case), *medians in zip(_ROWS, *rounds, strict=True):
        bare, encoding, traced = (Figure(values) for values in zip(*medians, strict=True))
        added = traced - bare
        multiple = added / encoding
        verdict = ""
        if case.promise is not None:
            verdict = case.promise.verdict(added if case.promise.unit == "µs" else multiple)
        rows.append(
            [
                f"{setting}: {case.name}",
                bare.text("µs"),
                added.text("µs"),
                encoding.text("µs"),
                multiple.text("x"),
                verdict,
            ]
        )
    return Table(
        "Cost of a traced call",
        ("payload", "bare call", "tracing adds", "one encoding", "adds / encoding", "promise"),
        rows,
        (
            f"Medians of {CALLS_PER_ROUND} calls, in {ROUNDS} fresh processes (lowest to highest). "
            "Bare call, encoding and traced call alternate in one loop.",
            "Paced: 1 ms of waiting before each, as in a rollout, so that caches are cold. "
            "Flooded: no pause.",
            "One encoding: msgpack of arguments and result into a buffer that is reused, hence "
            "without the cost of keeping the bytes.",
        ),
    )
