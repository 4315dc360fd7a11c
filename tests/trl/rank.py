"""One process of a job with several: the first one starts the recording, and the others follow."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import distributed

import localtrace
from localtrace.trainer_hooks.trl import record
from tests.trl.training import make_trainer


def main(rank: int, port: int, model: Path, folder: Path) -> None:
    """Train for two steps, as torchrun would; what TRL had in this process is left in a file."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCALTRACE_MIN_FREE_BYTES": 0}
    os.environ.update({name: str(value) for name, value in place.items()})
    trainer = make_trainer(model, folder / "out", per_device_train_batch_size=3, max_steps=2)
    assert distributed.get_rank() == rank
    if rank == 0:
        localtrace.init(folder / "store", project="several", experiment="ranks", seal=False)
    record(trainer)
    trainer.train()
    torch.save(trainer.launches, folder / f"rank{rank}.pt")
    localtrace.close()
    distributed.destroy_process_group()
