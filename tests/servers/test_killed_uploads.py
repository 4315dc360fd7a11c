"""An uploader that is killed, short of disk or in a failing network doubles and loses nothing."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import pytest
from mlflow import MlflowClient

import localtrace
from localtrace.read.store import open_store
from tests.crash.disks import fill, mounted
from tests.environment import soaks
from tests.servers.many import record

KILLS = 20 if soaks() else 3
TRAJECTORIES = 100 * KILLS
CALLS = 3
"""Calls of each trajectory, the root included."""


class Tracker(Protocol):
    """A real server that can be made to fail."""

    options: list[str]
    environment: dict[str, str]
    rate: str
    """Slow enough, and batches small enough, for all kills before the end."""

    def unsteady(self) -> None:
        """Fail a share of the requests that store something, in every way there is."""

    def steady(self) -> None: ...

    def close_door(self) -> None: ...

    def open_door(self) -> None: ...

    def stored(self) -> Counter[str]:
        """Count each trajectory by the target's id; whole ones only."""

    def rewards(self) -> list[float]:
        """Return the rewards that the trajectories show, sorted."""


class Mlflow:
    rate = "300kB"

    def __init__(self, network: Any, server_url: str, experiment: str) -> None:
        self._network = network
        self._experiment = experiment
        self._client = MlflowClient(server_url)
        self.options = ["--to", "mlflow", "--uri", network.url, "--experiment", experiment]
        self.environment: dict[str, str] = {}
        self.close_door, self.open_door = network.close_door, network.open_door

    def unsteady(self) -> None:
        drawn = random.Random(1)
        kinds = [429, 500, 503, "cut", "lose", *[None] * 5]
        self._network.fault = lambda body: drawn.choice(kinds)

    def steady(self) -> None:
        self._network.fault = lambda body: None

    def stored(self) -> Counter[str]:
        place = self._client.get_experiment_by_name(self._experiment).experiment_id
        whole: Counter[str] = Counter()
        token = None
        while True:
            page = self._client.search_traces(locations=[place], max_results=500, page_token=token)
            whole.update(t.info.trace_id for t in page if len(t.data.spans) == CALLS)
            token = page.token
            if not token:
                return whole

    def rewards(self) -> list[float]:
        place = self._client.get_experiment_by_name(self._experiment).experiment_id
        page = self._client.search_traces(locations=[place], max_results=500)
        return sorted(float(trace.info.tags["reward"]) for trace in page)


class Weave:
    rate = "120kB"

    def __init__(self, server: Any, name: str) -> None:
        self._server = server
        self.project = f"team/{name}"
        self.options = ["--to", "weave", "--project", self.project]
        self.environment = server.environment
        self.close_door, self.open_door = server.close_door, server.open_door

    def unsteady(self) -> None:
        kinds = (429, 500, 503, "lost_before", "cut_after_body", "lost_200")
        self._server.fault(*kinds, share=0.5, seed=1)

    def steady(self) -> None:
        self._server.fault()

    def stored(self) -> Counter[str]:
        rows, distinct = self._server.rows(self.project)
        assert rows == distinct
        calls = Counter(call["trace_id"] for call in self._server.calls(self.project))
        return Counter({trace_id: 1 for trace_id, n in calls.items() if n == CALLS})

    def rewards(self) -> list[float]:
        roots = {"trace_roots_only": True}
        shown = self._server.calls(self.project, filter=roots, latest_only=True)
        return sorted(call["attributes"]["reward"] for call in shown)


@pytest.fixture(params=["mlflow", "weave"])
def tracker(request: pytest.FixtureRequest) -> Iterator[Tracker]:
    name = str(uuid4())
    if request.param == "mlflow":
        network = request.getfixturevalue("network")
        yield Mlflow(network, request.getfixturevalue("mlflow_url"), name)
    else:
        yield Weave(request.getfixturevalue("clickhouse_weave"), name)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many") / "store"
    record(folder, TRAJECTORIES)
    return folder


@pytest.fixture
def start(many: Path, tracker: Tracker) -> Callable[..., subprocess.Popen[str]]:
    def start(*more: str, store: Path = many) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.servers.impatient", "upload", "--all", *tracker.options,
             *more, "--store", str(store)],
            env={**os.environ, **tracker.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    return start


def accepted(state_folder: Path) -> int:
    path = state_folder / "ledger.sqlite"
    if not path.exists():
        return 0
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as ledger:
        try:
            query = "select count(*) from entries where accepted"
            return int(ledger.execute(query).fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


@pytest.mark.timeout(900)
def test_after_many_kills_and_many_faults_everything_is_there_once(
    many, tracker, start, state_folder, tmp_path
) -> None:
    drawn = random.Random(0)
    tracker.unsteady()
    for kill in range(KILLS):
        before = accepted(state_folder)
        assert before < TRAJECTORIES
        uploader = start("--rate", tracker.rate)
        if kill % 3 == 2:
            tracker.close_door()
            time.sleep(drawn.uniform(0, 2))
            tracker.open_door()
        # From soon after the start, when nothing new is sent yet, to somewhere among batches.
        wanted = before + drawn.choice([0, 1, 50])
        wait_for(lambda: accepted(state_folder) >= wanted or uploader.poll() is not None)  # noqa: B023
        time.sleep(drawn.uniform(0, 0.5))
        uploader.kill()
        uploader.communicate()
    tracker.steady()
    last = start()
    output, _ = last.communicate(timeout=300)
    assert last.returncode == 0, output
    receipt = json.loads(max(state_folder.glob("receipts/*.json")).read_text())
    assert receipt["counts"]["already there"] >= KILLS
    assert receipt["counts"]["verified"] == TRAJECTORIES
    with open_store(many) as store:
        recorded = {row["trace_id"] for row in store.trajectories().to_dicts()}
    assert {trace["trace_id"] for trace in receipt["traces"]} == recorded
    stored = tracker.stored()
    assert set(stored.values()) == {1}
    assert len(stored) == TRAJECTORIES


def test_changes_arrive_through_faults_once_and_show_everywhere(tracker, start, tmp_path) -> None:
    store = tmp_path / "changing"
    record(store, 30)
    assert "30 sent" in start(store=store).communicate(timeout=120)[0]
    with open_store(store) as opened:
        rows = opened.trajectories().to_dicts()
    localtrace.init(store, min_free_bytes=0, seal=False)
    for row in rows[:10]:
        localtrace.outcome(row["trace_id"], reward=9.0)
    localtrace.close()
    tracker.unsteady()
    output, _ = start(store=store).communicate(timeout=200)
    assert "10 sent" in output
    assert "10 replace an earlier version" in output
    assert "30 read back" in output
    assert tracker.rewards() == sorted([row["reward"] for row in rows[10:]] + [9.0] * 10)


@pytest.mark.parametrize("tracker", ["weave"], indirect=True)
def test_an_upload_that_the_disk_stopped_goes_on_when_there_is_space(
    tracker, start, tmp_path, monkeypatch
) -> None:
    with mounted(tmp_path / "disk", "size=512k") as disk:
        monkeypatch.setenv("LOCALTRACE_STATE_DIR", str(disk))
        assert "30 sent" in start("--limit", "30").communicate(timeout=120)[0]
        fill(disk / "checkpoint")
        stopped = start()
        assert "free space there" in stopped.communicate(timeout=120)[0]
        assert stopped.returncode == 1
        (disk / "checkpoint").unlink()
        assert f"{TRAJECTORIES} read back" in start().communicate(timeout=120)[0]
    stored = tracker.stored()
    assert set(stored.values()) == {1}
    assert len(stored) == TRAJECTORIES
