"""The same small call through localtrace and through what one would use instead, in one run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import localtrace
from tests.benchmarks.calls import small, traced_small
from tests.benchmarks.figures import Figure, Promise, Table
from tests.benchmarks.timing import PACE_S, clock_ns, median_us, recording

ROUNDS = 5
CALLS_PER_ROUND = 100

Call = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Peer:
    """One way of tracing the call."""

    name: str
    call: Call
    trajectory: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Opens what encloses the calls of one round."""
    flush: Callable[[], Any] = lambda: None
    """Waits until everything has left this process."""
    promise: Promise | None = None


@contextlib.contextmanager
def _bare(folder: Path) -> Iterator[Peer]:
    yield Peer("bare call", small)


@contextlib.contextmanager
def _localtrace(folder: Path) -> Iterator[Peer]:
    with recording():
        trajectory = functools.partial(localtrace.trajectory, step=1)
        yield Peer("localtrace", traced_small, trajectory, functools.partial(localtrace.flush, 60))


@contextlib.contextmanager
def _json_lines(folder: Path) -> Iterator[Peer]:
    """Write as a user would: one line per call, flushed so that a crash loses nothing."""
    with (folder / "trace.jsonl").open("w", encoding="utf-8") as file:

        async def traced(question: str, temperature: float) -> dict[str, Any]:
            started_ns = time.time_ns()
            outputs = await small(question, temperature)
            inputs = {"question": question, "temperature": temperature}
            record = {
                "op": "small", "start_ns": started_ns, "end_ns": time.time_ns(),
                "inputs": inputs, "outputs": outputs,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")
            file.flush()
            return outputs

        yield Peer("JSON Lines, json.dumps and flush", traced)


@contextlib.contextmanager
def _mlflow(folder: Path) -> Iterator[Peer]:
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.set_experiment("bench")
    mlflow.config.enable_async_logging()
    yield Peer(
        f"live MLflow {mlflow.__version__}, SQLite",
        mlflow.trace(small),
        functools.partial(mlflow.start_span, "agent_loop"),
        mlflow.flush_trace_async_logging,
        Promise("P1", 40, "x", at_least=True),
    )


@contextlib.contextmanager
def _discarding_server() -> Iterator[str]:
    command = [sys.executable, "-m", "tests.benchmarks.discarding_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


@contextlib.contextmanager
def _weave(folder: Path) -> Iterator[Peer]:
    with _discarding_server() as address:
        os.environ |= {
            "WF_TRACE_SERVER_URL": address,
            "WANDB_BASE_URL": address,
            "WANDB_API_KEY": "0" * 40,
            "WANDB_ERROR_REPORTING": "false",
            "WEAVE_PRINT_CALL_LINK": "false",
            "WEAVE_USE_SERVER_CACHE": "false",
            "HOME": str(folder),
        }
        import weave

        client = weave.init("bench/bench")

        @contextlib.contextmanager
        def trajectory() -> Iterator[None]:
            call = client.create_call("agent_loop", {})
            yield
            client.finish_call(call)

        yield Peer(
            f"live Weave {weave.__version__}, discarding server",
            weave.op(small),
            trajectory,
            client.flush,
            Promise("P1", 100, "x", at_least=True),
        )
        weave.finish()


@contextlib.contextmanager
def _trackio(folder: Path) -> Iterator[Peer]:
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    import trackio

    async def traced(question: str, temperature: float) -> dict[str, Any]:
        outputs = await small(question, temperature)
        content = json.dumps({"question": question, "temperature": temperature})
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": json.dumps(outputs)},
        ]
        trackio.log({"rollout_trace/small": trackio.Trace(messages=messages)})
        return outputs

    trackio.init(project="bench", name="bench", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    yield Peer(f"live Trackio {trackio.__version__}", traced)
    trackio.finish()


async def _one_round(peer: Peer, gap_s: float | None) -> tuple[float, float]:
    """Median time of one call, and CPU of all threads per call with the flush; both in µs."""
    durations_ns = []
    started_s = time.process_time()
    with peer.trajectory():
        for _ in range(CALLS_PER_ROUND):
            if gap_s is not None:
                await asyncio.sleep(gap_s)
            start_ns = clock_ns()
            await peer.call("6 * 7", 1.0)
            durations_ns.append(clock_ns() - start_ns)
    peer.flush()
    cpu_us = (time.process_time() - started_s) * 1e6
    return median_us(durations_ns), cpu_us / CALLS_PER_ROUND


async def _measured(peers: list[Peer], gap_s: float | None) -> list[tuple[Figure, Figure]]:
    """Time and CPU of each peer; they take turns, so that noise hits all alike."""
    rounds = []
    for _ in range(ROUNDS + 1):
        rounds.append([await _one_round(peer, gap_s) for peer in peers])
    return [
        (Figure(tuple(times)), Figure(tuple(cpu)))
        for times, cpu in (zip(*taken, strict=True) for taken in zip(*rounds[1:], strict=True))
    ]


def _rows(setting: str, peers: list[Peer], figures: list[tuple[Figure, Figure]]) -> list[list[str]]:
    """One row per peer but the first, the bare call; the second is localtrace."""
    bare_time, bare_cpu = figures[0]
    added = [(time_ - bare_time, cpu - bare_cpu) for time_, cpu in figures[1:]]
    rows = []
    for peer, (time_added, cpu_added) in zip(peers[1:], added, strict=True):
        ratios = {"time": time_added / added[0][0]}
        if setting == "flooded":  # else it drowns in that of the waiting loop
            ratios["CPU"] = cpu_added / added[0][1]
        verdict = ""
        if peer.promise is not None:
            outcomes = [f"{name} {peer.promise.outcome(ratio)}" for name, ratio in ratios.items()]
            verdict = f"{peer.promise}: {', '.join(outcomes)}"
        cpu = ratios["CPU"].text("x") if "CPU" in ratios else ""
        figures_text = [time_added.text("µs"), ratios["time"].text("x"), cpu]
        rows.append([f"{setting}: {peer.name}", *figures_text, verdict])
    return rows


def measure() -> Table:
    """Added time and CPU of each peer, as multiples of localtrace's."""
    ways = [_bare, _localtrace, _json_lines, _mlflow, _weave]
    if importlib.util.find_spec("trackio"):
        ways.append(_trackio)
    rows = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers = [stack.enter_context(way(folder)) for way in ways]
        for setting, gap_s in (("paced", PACE_S), ("flooded", None)):
            rows += _rows(setting, peers, asyncio.run(_measured(peers, gap_s)))
    return Table(
        "The same small call, traced by others",
        ("traced by", "adds to the call", "of localtrace's", "CPU, of localtrace's", "promise"),
        rows,
        (
            f"Medians of {CALLS_PER_ROUND} calls in one trajectory; the peers in turn in one "
            f"process, {ROUNDS} rounds (lowest to highest).",
            "CPU: all threads of this process, with sending and flushing. Weave: the real client "
            "against a loopback server that answers at once and discards everything.",
        ),
    )
