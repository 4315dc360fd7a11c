"""A cluster of one node whose processes record, and what they recorded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import localtrace
from localtrace.read.store import open_store
from localtrace.trainer_hooks.ray import runtime_env
from tests.environment import unavailable

ROOT = Path(__file__).parents[2]
_TRAJECTORIES = """
select t.*, p.worker, p.ended,
    (select list(op order by seq) from spans s where s.trace_id = t.trace_id) as ops
from trajectories t left join processes p using (writer_id)
where list_contains($trace_ids, trace_id) and status <> 'running'
qualify count(*) over () = len($trace_ids)
"""


class Job:
    """A job of Ray, seen from its driver."""

    def __init__(self, store: Path) -> None:
        self.store = store

    def sql(self, text: str, **params: Any) -> list[dict[str, Any]]:
        """Ask the store as it is now."""
        with open_store(self.store) as opened:
            return opened.sql(text, params).to_dicts()

    def trajectories(self, trace_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Trajectories that ended, each with its process and the ops of its calls in order."""
        rows = self.sql_until_there(_TRAJECTORIES, trace_ids=list(trace_ids))
        return {row["trace_id"]: row for row in rows}

    def trajectory(self, trace_id: str) -> dict[str, Any]:
        """One of them."""
        return self.trajectories([trace_id])[trace_id]

    def sql_until_there(self, text: str, **params: Any) -> list[dict[str, Any]]:
        """Ask again until there are rows: what a process has recorded, it writes a moment later."""
        deadline = time.monotonic() + 30
        while not (rows := self.sql(text, **params)):
            assert time.monotonic() < deadline, f"no row for {params}: {text}"
            time.sleep(0.05)
        return rows


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    try:
        import ray
    except ImportError as error:
        unavailable(str(error))
    store = tmp_path_factory.mktemp("job") / "store"
    environment = runtime_env(
        {"env_vars": {"PYTHONPATH": str(ROOT)}},
        store=store, project="ray", min_free_bytes=0, seal=False, worker="driver",
    )  # fmt: skip
    ray.init("local", num_cpus=2, include_dashboard=False, runtime_env=environment)
    try:
        yield Job(store)
    finally:
        ray.shutdown()
        localtrace.close()


def wait_until_gone(pid: int, timeout_s: float = 30.0) -> None:
    """Wait for a process of Ray to end."""
    deadline = time.monotonic() + timeout_s
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}"), f"process {pid} still lives"
