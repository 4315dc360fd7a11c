"""`python -m tests.benchmarks.sglang_hook`: what recording costs in the engine's own process.

It needs SGLang, so it runs in the environment of `make test-sglang`. Each round generates the same
load twice in one engine, with the hook and without it, in turns. Counted is the CPU time of the
process with the tokenizer manager: all its threads, until what was recorded is in the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.figures import Figure, Promise, Table
from tests.benchmarks.timing import recording
from tests.sglang.conftest import SETTINGS
from tests.sglang.model import make_model

ROUNDS = 24
CONCURRENT = 32
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 256
_PROMISE = Promise("hook", 2, "% of the engine process")
_LOADS = {
    "one answer, with logprobs": {"stream": False, "return_logprob": True},
    "streamed, with logprobs": {"stream": True, "return_logprob": True},
    "streamed, without": {"stream": True},
}


@contextlib.contextmanager
def _without_hook(engine: Any) -> Iterator[None]:
    kind = type(engine.tokenizer_manager)
    hooked = kind.generate_request
    kind.generate_request = hooked.__wrapped__
    try:
        yield
    finally:
        kind.generate_request = hooked


async def _ask(engine: Any, number: int, load: dict[str, Any]) -> None:
    prompt = [(number * 31 + place * 7) % 500 + 2 for place in range(PROMPT_TOKENS)]
    sampling = {"max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    result = await engine.async_generate(input_ids=prompt, sampling_params=sampling, **load)
    if load["stream"]:
        async for _ in result:
            pass


def _generate(engine: Any, load: dict[str, Any]) -> None:
    async def everything() -> None:
        await asyncio.gather(*(_ask(engine, number, load) for number in range(CONCURRENT)))

    engine.loop.run_until_complete(everything())


def _cpu_s(engine: Any, load: dict[str, Any]) -> float:
    import localtrace

    begun_s = time.process_time()
    _generate(engine, load)
    localtrace.flush(60)
    return time.process_time() - begun_s


def _round(engine: Any, load: dict[str, Any], hook_first: bool) -> tuple[float, float]:
    """CPU time without the hook and with it."""
    measured: dict[bool, float] = {}
    for has_hook in (hook_first, not hook_first):
        if has_hook:
            with recording():
                measured[True] = _cpu_s(engine, load)
        else:
            with _without_hook(engine):
                measured[False] = _cpu_s(engine, load)
    return measured[False], measured[True]


def measure(model: Path) -> Table:
    """All loads in one engine."""
    import sglang

    settings = {**SETTINGS, "max_total_tokens": 2 * CONCURRENT * (PROMPT_TOKENS + OUTPUT_TOKENS)}
    engine = sglang.Engine(model_path=str(make_model(model)), **settings)
    rows = []
    for name, load in _LOADS.items():
        _round(engine, load, True)
        rounds = [_round(engine, load, number % 2 == 0) for number in range(ROUNDS)]
        without, with_hook = (Figure(values) for values in zip(*rounds, strict=True))
        added = with_hook - without
        share = Figure(tuple(100 * value for value in (added / without).rounds))
        each = Figure(tuple(1e6 * value / CONCURRENT for value in added.rounds))
        rows.append(
            [name, without.text("s"), each.text("µs"), share.text("%"), _PROMISE.verdict(share)]
        )
        print(f"{name}: done", file=sys.stderr)
    engine.shutdown()
    return Table(
        "CPU time of the SGLang hook in the process with the tokenizer manager",
        ("load", "CPU without", "hook per request", "hook / without", "promise"),
        rows,
        (
            f"SGLang {sglang.__version__} on a CPU, a tiny model: {CONCURRENT} requests at once, "
            f"{PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens each.",
            f"Medians of {ROUNDS} rounds (lowest to highest), each with and without the hook.",
        ),
    )


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="localtrace-bench-") as folder:
        print(measure(Path(folder)).plain())


if __name__ == "__main__":
    main()
