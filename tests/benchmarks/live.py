"""Looking at a run that is being recorded, beside the same store once it is sealed."""

from __future__ import annotations

import itertools
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import localtrace
from localtrace.store.journal.disk import size_of
from localtrace.store.layout import open_layout
from localtrace.store.sealing.seal import seal
from tests.benchmarks.figures import Figure, Promise, Table
from tests.benchmarks.timing import close_recorder

JOURNALS_BYTES = 40 * 2**20
ROUNDS = 3
_REFRESHES = 9
_GLANCE = Promise("live", 1.3, "x")
_CALLS = Promise("live", 2, "x")


@dataclass(frozen=True, slots=True)
class Shape:
    """The turns of a trajectory, and whether its ids are arrays."""

    name: str
    turns: int
    output_tokens: int
    are_arrays: bool = False


SHAPES = (
    Shape("1 turn of 300 ids", 1, 300),
    Shape("30 turns of 1,200 ids", 30, 1200),
    Shape("30 turns of 1,200 ids, as arrays", 30, 1200, are_arrays=True),
)
_COMMANDS = {
    "runs": (("runs",), _GLANCE),
    "a curve": (("query", "reward_by_step"), _GLANCE),
    "ls": (("ls", "--limit", "20"), _CALLS),
    "show": (("show",), _CALLS),
    "group": (("group", "step=0", "sample_index=0"), _CALLS),
    "tail": (("tail", "--no-follow"), _CALLS),
    "sql over all turns": (("sql", "select sum(len(output_ids)) from turns"), None),
}


@localtrace.op
def _generate(prompt_ids: Any, output_ids: Any, logprobs: Any) -> dict[str, Any]:
    return {"output_ids": output_ids, "logprobs": logprobs, "finish_reason": "stop"}


@localtrace.op(kind="tool")
def _look_up(word: str) -> str:
    return f"nothing about {word}" * 8


def _roll_out(shape: Shape, number: int, dice: np.random.Generator) -> str:
    place = {"step": number // 8, "sample_index": number % 8, "rollout_n": 0}
    with localtrace.trajectory(**place, group_id=str(number // 4)) as trajectory:
        prompt = dice.integers(0, 150_000, 200)
        for _ in range(shape.turns):
            output = dice.integers(0, 150_000, shape.output_tokens)
            given = [prompt, output, dice.normal(-1, 0.5, shape.output_tokens)]
            _generate(*(given if shape.are_arrays else (values.tolist() for values in given)))
            _look_up("word")
            prompt = np.concatenate([prompt, output])
        trajectory.set(reward=float(number % 7))
    return trajectory.trace_id


def _record(store: Path, shape: Shape) -> str:
    """Record journals of `JOURNALS_BYTES`; returns a trace id."""
    dice, trace_id = np.random.default_rng(1), ""
    localtrace.init(store, min_free_bytes=0, seal=False, rotate_max_bytes=16 * 2**20)
    for number in itertools.count():
        trace_id = _roll_out(shape, number, dice)
        if number % 8 == 7:
            localtrace.flush()
            if size_of(store / "journals") >= JOURNALS_BYTES:
                break
    close_recorder()
    return trace_id


def _command_ms(store: Path, arguments: Sequence[str]) -> float:
    """CPU of a command and of the processes that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = [sys.executable, "-m", "localtrace", *arguments, "-s", str(store)]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _cpu_ms(work: Callable[[], Any]) -> float:
    started_s = time.process_time()
    work()
    return (time.process_time() - started_s) * 1000


def _refresh(store: Path, shape: Shape) -> tuple[Figure, Figure]:
    """CPU of a refresh, of nothing new and of about one new MB."""
    dice, nothing, growth = np.random.default_rng(2), [], []
    with localtrace.open_store(store) as opened:
        localtrace.init(store, min_free_bytes=0, seal=False)
        for number in range(_REFRESHES):
            until = size_of(store / "journals") + 2**20
            while size_of(store / "journals") < until:
                _roll_out(shape, number, dice)
                localtrace.flush()
            growth.append(_cpu_ms(opened.refresh))
            nothing.append(_cpu_ms(opened.refresh))
        close_recorder()
    return Figure(tuple(nothing)), Figure(tuple(growth))


def _rows(folder: Path, shape: Shape) -> list[list[str]]:
    live, sealed = folder / "live", folder / "sealed"
    trace_id = _record(live, shape)
    shutil.copytree(live, sealed)
    sealing_ms = _cpu_ms(lambda: seal(open_layout(sealed)))
    rows = []
    for name, (arguments, promise) in _COMMANDS.items():
        chosen = (*arguments, trace_id) if name == "show" else arguments
        both = [(_command_ms(live, chosen), _command_ms(sealed, chosen)) for _ in range(ROUNDS)]
        now, then = (Figure(values) for values in zip(*both, strict=True))
        verdict = "" if promise is None else promise.verdict(now / then)
        texts = (now.text("ms"), then.text("ms"), (now / then).text("x"), verdict)
        rows.append([shape.name, name, *texts])
    nothing, growth = _refresh(live, shape)
    rows.append([shape.name, "refresh, nothing new", nothing.text("ms"), "", "", ""])
    rows.append([shape.name, "refresh, 1 MB more", growth.text("ms"), "", "", ""])
    rows.append([shape.name, "seal, in this process", f"{sealing_ms:.0f} ms", "", "", ""])
    return rows


def measure() -> Table:
    """CPU of commands over journals and over tables, of a refresh, and of sealing."""
    rows = []
    for shape in SHAPES:
        with tempfile.TemporaryDirectory(prefix="localtrace-bench-") as folder:
            rows += _rows(Path(folder), shape)
    return Table(
        f"Looking at a run, with {JOURNALS_BYTES // 2**20} MB in journals",
        ("trajectories", "what", "live", "sealed", "live / sealed", "promise"),
        rows,
        (
            f"CPU of all processes, user and system, {ROUNDS} rounds (lowest to highest); "
            f"refreshes: {_REFRESHES} in one process.",
        ),
    )
