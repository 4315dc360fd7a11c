"""An uploader that is killed again and again, in a failing network, doubles and loses nothing."""

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

import pytest
from mlflow import MlflowClient

from localtrace.read.store import open_store
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


class Mlflow:
    rate = "300kB"

    def __init__(self, network: Any, server_url: str) -> None:
        self._network = network
        self._client = MlflowClient(server_url)
        self.options = ["--to", "mlflow", "--uri", network.url, "--experiment", "killed"]
        self.environment: dict[str, str] = {}
        self.close_door, self.open_door = network.close_door, network.open_door

    def unsteady(self) -> None:
        drawn = random.Random(1)
        kinds = [429, 500, 503, "cut", "lose", *[None] * 5]
        self._network.fault = lambda body: drawn.choice(kinds)

    def steady(self) -> None:
        self._network.fault = lambda body: None

    def stored(self) -> Counter[str]:
        place = self._client.get_experiment_by_name("killed").experiment_id
        whole: Counter[str] = Counter()
        token = None
        while True:
            page = self._client.search_traces(locations=[place], max_results=500, page_token=token)
            whole.update(t.info.trace_id for t in page if len(t.data.spans) == CALLS)
            token = page.token
            if not token:
                return whole


class Weave:
    project = "team/killed"
    rate = "120kB"

    def __init__(self, server: Any) -> None:
        self._server = server
        self.options = ["--to", "weave", "--project", self.project]
        self.environment = server.environment
        self.close_door, self.open_door = server.close_door, server.open_door

    def unsteady(self) -> None:
        kinds = (429, 500, 503, "lost_before", "cut_after_body", "lost_200")
        self._server.fault(*kinds, share=0.5, seed=1)

    def steady(self) -> None:
        self._server.fault()

    def stored(self) -> Counter[str]:
        # Not as the server merges rows, but as each was accepted.
        accepted = self._server.started_at_values(self.project)
        assert {len(values) for values in accepted.values()} == {1}
        calls = Counter(call["trace_id"] for call in self._server.calls(self.project))
        return Counter({trace_id: 1 for trace_id, n in calls.items() if n == CALLS})


@pytest.fixture(params=["mlflow", "weave"])
def tracker(request: pytest.FixtureRequest) -> Iterator[Tracker]:
    if request.param == "mlflow":
        network = request.getfixturevalue("network")
        yield Mlflow(network, request.getfixturevalue("mlflow_url"))
    else:
        server = request.getfixturevalue("weave_server")
        yield Weave(server)
        server.reset()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many") / "store"
    record(folder, TRAJECTORIES)
    return folder


@pytest.fixture
def start(many: Path, tracker: Tracker) -> Callable[..., subprocess.Popen[str]]:
    def start(*more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.servers.impatient", "upload", "--all", *tracker.options,
             *more, "--store", str(many)],
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
