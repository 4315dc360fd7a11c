"""The whole demo in order: train and record, look, upload, and say what to try next.

Everything it makes lies in one folder: the store, the tokenizer, MLflow's database and the
uploader's memory.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

import localtrace
from localtrace.demo import carry, report
from localtrace.demo.config import EXPERIMENT, PROJECT, DemoConfig
from localtrace.demo.train import train, warm_up
from localtrace.demo.vocabulary import tokenizer
from localtrace.demo.worker import rollout_workers
from localtrace.errors import ConfigError
from localtrace.filters import Filters

_MIN_FREE_BYTES = 64 * 2**20
"""The demo's store is small, so it may use a disk that is nearly full."""


def run_demo(folder: Path, config: DemoConfig, *, upload: bool = True) -> None:
    """Train in a folder and print what came of it.

    A folder that holds a demo already gets one more run in the same store.

    Raises:
        ConfigError: the folder holds something else.
    """
    store_path = folder / "store"
    if folder.exists() and any(folder.iterdir()) and not (store_path / "localtrace.json").exists():
        raise ConfigError(
            f"{folder} holds something else than a demo: name a new folder, as in "
            "localtrace demo another-folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    run_id = record(folder, config)
    with localtrace.open_store(store_path) as store:
        click.echo(f"\nReward by step of run {run_id}:")
        _print(report.reward_table(store, run_id))
        group = report.choose_group(store, run_id)
        best, worst = report.extremes(store, run_id, group["group_id"])
        click.echo(f"\nOne group, step {group['step']}, problem {group['sample_index']}: the best")
        _print(report.conversation(store, best))
        click.echo("and the worst")
        _print(report.conversation(store, worst))
        if upload:
            os.environ.setdefault("LOCALTRACE_STATE_DIR", str(folder / "uploader"))
            target = f"sqlite:///{(folder / 'mlflow.db').absolute()}"
            click.echo(f"\nUpload of the trained trajectories of step {group['step']} to {target}")
            selection = Filters(run=run_id, step=group["step"], fate="trained")
            _print(carry.carry_out(store, selection, target))
    click.echo("\nTry next:")
    _print(_commands(folder, best.trace_id, run_id, upload))


def record(folder: Path, config: DemoConfig) -> str:
    """Train, and record the rollouts into `store` in the folder; return the id of the run."""
    torch.set_num_threads(2)
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
        run_id = recording["run_id"] = str(localtrace.run_id())
        with rollout_workers(config.workers, recording) as workers:
            train(warm_up(config), workers, config)
    finally:
        localtrace.close()
    return run_id


def _commands(folder: Path, trace_id: str, run_id: str, uploaded: bool) -> Iterator[str]:
    store = f"-s {shlex.quote(str(folder / 'store'))}"
    yield f"localtrace runs {store}"
    yield f"localtrace ls {store} run={run_id} step=10..20 'reward<0.5'"
    yield f"localtrace show {store} {trace_id}"
    yield f"localtrace query {store} errors_by_op run={run_id}"
    yield f"localtrace sql {store} 'select fate, count(*) from trajectories group by fate'"
    if uploaded:
        database = shlex.quote(f"sqlite:///{folder / 'mlflow.db'}")
        yield f"mlflow server --backend-store-uri {database}"


def _print(lines: Iterator[str]) -> None:
    for line in lines:
        click.echo(line)
