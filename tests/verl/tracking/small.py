"""Workers that are known to the trainer like verl's own and do not import verl, for ten seconds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


class Stranger:
    """Does not load the hook."""

    def __init__(self, *_: Any) -> None:
        """Whatever verl's manager gives its workers."""

    def roll_out(self, count: int) -> int:
        """Record nothing."""
        return 0


class Worker:
    """Starts recording as the hook does in verl's worker, and makes trajectories when told to."""

    def __init__(self, *_: Any) -> None:
        from localtrace.trainer_hooks.verl import job, tracking

        job.start_recording()
        self.made = self.asked = 0
        status = tracking.status

        def counted() -> tracking.Status:
            self.asked += 1
            return status()

        tracking.status = counted

    def roll_out(self, count: int) -> int:
        """Make this many trajectories; give how many were made so far."""
        import localtrace

        for number in range(count):
            with localtrace.trajectory(step=1, sample_index=number, rollout_n=0):
                self.made += 1
        return self.made

    def times_asked(self) -> int:
        """How often the trainer has asked for its status."""
        return self.asked

    def block(self, end: Path) -> None:
        """Answer nothing until a file is there."""
        while not end.exists():
            time.sleep(0.01)
