"""Uploads that are killed, cut off or refused end, when repeated, with everything there once."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from localtrace.errors import TargetUnavailable
from localtrace.read.filters import Filters
from localtrace.read.store import Store, open_store
from localtrace.uploader import TargetOptions, upload
from localtrace.uploader.plan import Limits
from localtrace.uploader.receipts import Delivery, Receipt


@pytest.fixture
def experiment(request: pytest.FixtureRequest) -> str:
    return request.node.name


def stored(uri: str, experiment: str) -> list[str]:
    """Ids of all traces of an experiment, each as often as the server shows it."""
    client = MlflowClient(uri)
    place = client.get_experiment_by_name(experiment).experiment_id
    found, token = [], None
    while True:
        page = client.search_traces(
            locations=[place], max_results=500, page_token=token, include_spans=False
        )
        found += [trace.info.trace_id for trace in page]
        token = page.token
        if not token:
            return found


def span_count(uri: str, experiment: str) -> int:
    client = MlflowClient(uri)
    place = client.get_experiment_by_name(experiment).experiment_id
    page = client.search_traces(locations=[place], max_results=500)
    return sum(len(trace.data.spans) for trace in page)


def accepted(state_folder: Path) -> int:
    """Return how many records the ledger knows to be stored."""
    path = state_folder / "ledger.sqlite"
    if not path.exists():
        return 0
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as ledger:
        try:
            query = "select count(*) from entries where accepted"
            return int(ledger.execute(query).fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def start_upload(store: Store, uri: str, experiment: str) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "localtrace", "upload", "where=true", "--to", "mlflow"),
        *("--uri", uri, "--experiment", experiment, "--store", str(store.path)),
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def rejected(receipt: Receipt) -> list[str]:
    return [t.trace_id for t in receipt.traces if t.delivery is Delivery.REJECTED]


def test_a_killed_upload_goes_on_and_doubles_nothing(
    large_store, mlflow_url, experiment, state_folder
) -> None:
    for at_least in (50, 150, 250):
        uploader = start_upload(large_store, mlflow_url, experiment)
        wait_until(lambda: accepted(state_folder) >= at_least)  # noqa: B023
        uploader.kill()
        uploader.wait()
    assert accepted(state_folder) < 400
    receipt = upload(large_store, Filters(), mlflow_url, container=experiment)
    assert receipt.complete
    assert receipt.counts["already there"] >= 250
    ids = stored(mlflow_url, experiment)
    assert sorted(ids) == sorted(str(trace.remote_id) for trace in receipt.traces)
    assert len(set(ids)) == 400
    assert span_count(mlflow_url, experiment) == 800


def test_an_upload_outlives_a_server_that_is_killed_and_started_again(
    large_store, own_server, experiment, state_folder
) -> None:
    receipts: list[Receipt] = []

    def run() -> None:
        # A store serves the thread that opened it.
        with open_store(large_store.path) as store:
            receipts.append(upload(store, Filters(), own_server.url, container=experiment))

    uploading = threading.Thread(target=run)
    uploading.start()
    wait_until(lambda: accepted(state_folder) >= 100)
    own_server.end(signal.SIGKILL)
    own_server.start()
    uploading.join(120)
    assert receipts[0].complete
    assert receipts[0].counts["sent"] == 400
    ids = stored(own_server.url, experiment)
    assert len(ids) == len(set(ids)) == 400


@pytest.mark.parametrize("fault", [429, 500, 503, "cut", "lose"])
def test_every_second_request_may_fail(large_store, network, experiment, fault) -> None:
    seen = [0]

    def sometimes(body: bytes) -> Any:
        seen[0] += 1
        return fault if seen[0] % 2 else None

    network.fault = sometimes
    receipt = upload(large_store, Filters(step=0), network.url, container=experiment)
    assert receipt.complete
    assert receipt.counts["sent"] == 40
    ids = stored(network.url, experiment)
    assert len(ids) == len(set(ids)) == 40
    assert span_count(network.url, experiment) == 80


def test_a_lost_answer_is_asked_for_and_nothing_is_sent_twice(
    large_store, network, experiment
) -> None:
    bodies = []

    def lose_the_first(body: bytes) -> str | None:
        bodies.append(body)
        return "lose" if len(bodies) == 1 else None

    network.fault = lose_the_first
    receipt = upload(large_store, Filters(step=0), network.url, container=experiment)
    assert len(bodies) == 1
    assert receipt.complete


@pytest.mark.parametrize("status", [400, 413, 422, 500])
def test_one_record_that_the_server_refuses_stops_no_other(
    large_store, network, experiment, status, monkeypatch
) -> None:
    monkeypatch.setattr("localtrace.uploader.retry.DOUBT_ATTEMPTS", 1)
    poisoned = large_store.trajectories(sample_index="7").to_dicts()[0]["trace_id"]
    network.fault = lambda body: status if poisoned.encode() in body else None
    receipt = upload(large_store, Filters(step=0), network.url, container=experiment)
    assert rejected(receipt) == [poisoned]
    assert receipt.counts["verified"] == len(stored(network.url, experiment)) == 39
    network.fault = lambda body: None
    assert upload(large_store, Filters(step=0), network.url, container=experiment).complete


def test_a_run_that_the_server_did_not_note_is_linked_afterwards(
    store, network, experiment
) -> None:
    network.drops.add("x-mlflow-run-id")
    receipt = upload(store, Filters(), network.url, container=experiment)
    assert receipt.complete
    (run,) = receipt.runs
    linked = MlflowClient(network.url).search_traces(
        locations=[run.place.experiment], filter_string=f"run_id = '{run.place.run}'"
    )
    assert len(linked) == 6


def test_a_server_that_does_not_answer_for_long_can_be_tried_later(
    large_store, network, experiment
) -> None:
    network.fault = lambda body: 503
    with pytest.raises(TargetUnavailable, match=r"\d+ of \d+ .*\brepeat\b"):
        upload(
            large_store,
            Filters(step=0),
            network.url,
            container=experiment,
            limits=Limits(patience_s=0.5),
        )
    network.fault = lambda body: None
    assert upload(large_store, Filters(step=0), network.url, container=experiment).complete


def servers_of(database: Path) -> list[int]:
    """Process ids of servers that were started for a database."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(database) in command:
                found.append(int(entry.name))
    return found


def test_a_file_gets_a_server_for_the_upload_and_none_is_left(store, tmp_path) -> None:
    database = tmp_path / "mlflow.db"
    uri = f"sqlite:///{database}"
    receipt = upload(store, Filters(), uri, options=TargetOptions(assessments=True))
    assert receipt.complete
    assert receipt.target == uri
    assert servers_of(database) == []
    assert len(stored(uri, "arithmetic")) == 6
    assert len(MlflowClient(uri).search_traces(
        locations=[receipt.runs[0].place.experiment], filter_string="feedback.reward > 0.9"
    )) == 2  # fmt: skip


def test_the_same_file_behind_another_address_is_the_same_destination(
    store, own_server, state_folder
) -> None:
    own_server.end()
    uri = f"sqlite:///{own_server.database}"
    first = upload(store, Filters(), uri)
    own_server.start()
    second = upload(store, Filters(), own_server.url)
    assert second.counts["already there"] == 6
    assert first.runs == second.runs


def test_a_file_that_was_made_anew_is_another_destination(store, database, mlflow_server) -> None:
    first = upload(store, Filters(step=0), f"sqlite:///{database}")
    shutil.copy(mlflow_server.empty_database, database)
    second = upload(store, Filters(step=0), f"sqlite:///{database}")
    assert first.counts["sent"] == second.counts["sent"] == 2
    assert second.complete


def test_a_killed_uploader_leaves_no_server_behind(large_store, database, state_folder) -> None:
    uploader = start_upload(large_store, f"sqlite:///{database}", "killed")
    wait_until(lambda: accepted(state_folder) >= 50)
    assert servers_of(database)
    uploader.kill()
    uploader.wait()
    wait_until(lambda: not servers_of(database))
    receipt = upload(large_store, Filters(), f"sqlite:///{database}", container="killed")
    assert receipt.complete
    assert len(stored(f"sqlite:///{database}", "killed")) == 400
