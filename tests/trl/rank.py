"""One process of a job with several: the first one starts the recording, and the others follow."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed

import localtrace
from localtrace.trainer_hooks.trl import record
from tests.trl.training import make_trainer


def main(model: Path, folder: Path) -> None:
    """Train for two steps; what TRL had in this process is left in a file."""
    trainer = make_trainer(model, folder / "out", per_device_train_batch_size=3, max_steps=2)
    rank = distributed.get_rank()
    if rank == 0:
        localtrace.init(folder / "store", project="several", experiment="ranks")
    record(trainer)
    trainer.train()
    torch.save(trainer.launches, folder / f"rank{rank}.pt")
    localtrace.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
