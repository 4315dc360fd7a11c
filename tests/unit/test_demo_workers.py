"""The demo's rollout processes end with their driver, however it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_DRIVER = """
import sys, time
from localtrace.demo.policy import Policy
from localtrace.demo.worker import rollout_workers

recording = {"store": sys.argv[1], "run_id": "run", "seal": False, "min_free_bytes": 0}
with rollout_workers(2, recording) as workers:
    workers.roll_out(Policy(), [], weight_version=0, seed=0)
    print("working", flush=True)
    time.sleep(3600)
"""


def test_workers_end_when_their_driver_is_killed(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, str(tmp_path / "store")], stdout=subprocess.PIPE
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"working\n"

    driver.kill()

    # The workers hold the pipe too, so it ends when the last of them has ended.
    assert driver.communicate()[0] == b""
