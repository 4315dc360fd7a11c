"""`localtrace demo`: a small training run, from recording to upload."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from localtrace.errors import MissingDependency


@click.command()
@click.argument(
    "folder",
    metavar="[DIR]",
    type=click.Path(path_type=Path, file_okay=False),
    default="localtrace-demo",
)
@click.option("--steps", type=click.IntRange(1), default=120, show_default=True,
              help="Number of training steps.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True,
              help="Seed of weights, problems and sampling.")  # fmt: skip
@click.option(
    "--upload/--no-upload",
    default=True,
    help="Upload a selection to MLflow at the end, or not.  [default: upload]",
)
def command(folder: Path, steps: int, seed: int, upload: bool) -> None:
    """Train a tiny agent, record it, query it, upload it.

    A small transformer learns by GRPO to use a calculator. Its rollouts are recorded in DIR
    (default: localtrace-demo). Then it runs the commands that look at them, and one that uploads a
    selection to an MLflow database in the same folder. Nothing leaves this machine. Another demo
    in the same DIR adds a run.
    """
    for package in ("torch", "tokenizers", *(["mlflow"] if upload else [])):
        if find_spec(package) is None:
            raise MissingDependency.for_extra(package, "demo")
    from localtrace.demo.run import run_demo
    from localtrace.demo.train import DemoConfig

    run_demo(folder, DemoConfig(steps=steps, seed=seed), upload=upload)
