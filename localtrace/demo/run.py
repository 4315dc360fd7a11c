"""The whole demo in order: train and record, show, upload, and suggest what to try next.

One folder holds everything that it writes: the store, the tokenizer, MLflow's database and the
uploader's state.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import localtrace
from localtrace.demo import report
from localtrace.demo.config import EXPERIMENT, PROJECT, DemoConfig
from localtrace.demo.train import train, warm_up
from localtrace.demo.upload import upload_to_mlflow
from localtrace.demo.vocabulary import tokenizer
from localtrace.demo.worker import rollout_workers
from localtrace.errors import ConfigError
from localtrace.printing import say
from localtrace.read.filters import Filters

if TYPE_CHECKING:
    from localtrace.read.store import Store

_MIN_FREE_BYTES = 64 * 2**20
"""The demo's store is small, so it may use a disk that is nearly full."""


def run_demo(folder: Path, config: DemoConfig, *, upload: bool = True) -> None:
    """Train, record into a folder and print the results.

    A folder of an earlier demo gets one more run in the same store.

    Raises:
        ConfigError: the folder is not empty and not of an earlier demo.
    """
    store_path = folder / "store"
    if folder.exists() and any(folder.iterdir()) and not (store_path / "localtrace.json").exists():
        raise ConfigError(
            f"{folder} is not empty and holds no earlier demo: name a new folder, as in "
            "localtrace demo another-folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    run_id = record(folder, config)
    with localtrace.open_store(store_path) as store:
        step, trace_id = _show(store, run_id)
        if upload:
            _upload(store, folder, run_id, step)
    say()
    say("Try next:")
    _print(_commands(folder, run_id, trace_id, upload))


def record(folder: Path, config: DemoConfig) -> str:
    """Train and record the rollouts into `FOLDER/store`; return the run id."""
    # The policy is too small for several threads: on idle cores they gain little, on busy cores
    # they wait for each other (measured: four times slower).
    torch.set_num_threads(1)
    tokenizer_path = folder / "tokenizer.json"
    tokenizer().save(str(tokenizer_path))
    recording: dict[str, Any] = {
        "store": folder / "store",
        "project": PROJECT,
        "experiment": EXPERIMENT,
        "min_free_bytes": _MIN_FREE_BYTES,
    }
    localtrace.init(**recording, config=asdict(config), tokenizer=tokenizer_path, worker="driver")
    try:
        recording["run_id"] = run_id = str(localtrace.run_id())
        store = shlex.quote(str(folder / "store"))
        say(f"recording run {run_id}; to watch it:  localtrace tail -s {store}", err=True)
        with rollout_workers(config.workers, recording) as workers:
            train(warm_up(config), workers, config)
    finally:
        localtrace.close()
    return run_id


def _show(store: Store, run_id: str) -> tuple[int, str]:
    """Print the rewards and one group's extremes; return its step and best trace id."""
    say()
    say(f"Reward by step of run {run_id}:")
    _print(report.reward_table(store, run_id))
    group = report.choose_group(store, run_id)
    best, worst = report.extremes(store, run_id, group["group_id"])
    say()
    say(f"The best and the worst rollout of one group, step {group['step']}:")
    _print(report.conversation(store, best))
    _print(report.conversation(store, worst))
    return group["step"], best.trace_id


def _upload(store: Store, folder: Path, run_id: str, step: int) -> None:
    os.environ.setdefault("LOCALTRACE_STATE_DIR", str(folder.absolute() / "uploader"))
    target = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
    say()
    say(f"Upload of step {step} to {target}:")
    say("starting an MLflow server on this machine …", err=True)
    _print(upload_to_mlflow(store, Filters(run=run_id, step=step, validate=False), target))


def _commands(folder: Path, run_id: str, trace_id: str, uploaded: bool) -> Iterator[str]:
    program, store = _program("localtrace"), f"-s {shlex.quote(str(folder / 'store'))}"
    yield f"  {program} view {store}"
    yield f"  {program} runs {store}"
    yield f"  {program} ls {store} run={run_id} step=1..10 'reward<0.5'"
    yield f"  {program} show {store} {trace_id}"
    yield f"  {program} query {store} errors_by_op run={run_id}"
    yield f"  {program} sql {store} 'select fate, count(*) from trajectories group by fate'"
    if uploaded:
        database = shlex.quote(f"sqlite:///{folder / 'mlflow.db'}")
        yield f"  {_program('mlflow')} server --backend-store-uri {database}"


def _program(name: str) -> str:
    """Return the command for a program of this environment, also if it is not on the PATH."""
    beside_python = os.path.relpath(Path(sys.executable).with_name(name))
    return name if shutil.which(name) else shlex.quote(beside_python)


def _print(lines: Iterator[str]) -> None:
    for line in lines:
        say(line)
