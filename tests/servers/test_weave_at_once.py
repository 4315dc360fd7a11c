"""No two uploads send the same run to a Weave project at the same moment, dead ones included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any
from uuid import uuid4

import pytest

from localtrace.read.filters import Filters
from localtrace.read.store import Store
from localtrace.types import Run
from localtrace.uploader import upload
from localtrace.uploader.targets.weave import WeaveTarget
from tests.servers.many import record
from tests.servers.weave import WeaveServer

COUNT = 300
CALLS = 3 * COUNT
RUN = Run("run", 0, "arithmetic", "grpo", 1, None, None)


@pytest.fixture(autouse=True)
def environment(failing_weave: WeaveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in failing_weave.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def project() -> str:
    return f"team/{uuid4()}"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many") / "store"
    record(folder, COUNT)
    return folder


@pytest.fixture
def start(many: Path, project: str, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def start(machine: str, *more: str) -> subprocess.Popen[str]:
        """Start an upload with the ledger of one of several machines."""
        return subprocess.Popen(
            [sys.executable, "-m", "tests.servers.impatient", "upload", "--all", "--to", "weave",
             "--project", project, "--store", str(many), *more],
            env={**os.environ, "LOCALTRACE_STATE_DIR": str(tmp_path / machine)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    return start


@pytest.fixture
def open_target() -> Iterator[Callable[[], WeaveTarget]]:
    """Targets as uploads on other machines have them."""
    opened = []

    def open_target() -> WeaveTarget:
        opened.append(WeaveTarget(None, wandb_run=None))
        opened[-1].check()
        return opened[-1]

    yield open_target
    for target in opened:
        target.close()


def sendings(server: WeaveServer, project: str) -> Counter[int]:
    """Count the calls by how often each was stored."""
    return Counter(len(sent) for sent in server.started_at_values(project).values())


def receipts(folder: Path) -> Iterator[Any]:
    return (json.loads(path.read_text()) for path in folder.glob("*/receipts/*.json"))


def test_three_machines_that_upload_a_run_at_once_store_each_call_once(
    failing_weave: WeaveServer, project: str, start: Any, tmp_path: Path
) -> None:
    other_name = failing_weave.url.replace("127.0.0.1", "localhost")
    uploads = [start("a"), start("b"), start("c", "--uri", other_name)]
    printed = [upload.communicate(timeout=120)[0] for upload in uploads]
    assert [upload.returncode for upload in uploads] == [0] * 3, printed
    assert sendings(failing_weave, project) == {1: CALLS}
    counts = [receipt["counts"] for receipt in receipts(tmp_path)]
    assert sorted(count["sent"] for count in counts) == [0, 0, COUNT]
    assert {count["verified"] for count in counts} == {COUNT}
    assert sum("waiting for another upload of run" in text for text in printed) >= 2
    assert failing_weave.feedback(project) == []


def test_what_a_killed_upload_left_under_way_is_not_sent_again(
    failing_weave: WeaveServer, project: str, start: Any
) -> None:
    assert "3 sent" in start("a", "--limit", "3").communicate(timeout=60)[0]
    failing_weave.fault("slow", next=2)
    before = len(failing_weave.log())
    killed = start("a")
    wait_until(lambda: len(failing_weave.log()) >= before + 2)
    killed.kill()
    killed.communicate()
    under_way = [request["size_bytes"] for request in failing_weave.log()[before:]]
    assert max(under_way) < 70_000  # what the server may still be storing is little
    again = start("b")
    printed = again.communicate(timeout=120)[0]
    assert again.returncode == 0
    assert "if it was killed" in printed
    assert sendings(failing_weave, project) == {1: CALLS}


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_an_upload_begins_when_no_other_of_its_run_shows_signs_of_life(
    failing_weave: WeaveServer,
    project: str,
    open_target: Callable[[], WeaveTarget],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("localtrace.uploader.targets.weave_announcements.QUIET_S", 1.0)
    first, second, third = (open_target() for _ in range(3))
    place = first.place(RUN, project)
    other_run = Run("other", 0, "arithmetic", "grpo", 1, None, None)
    assert first.begin(place, RUN)
    assert not second.begin(place, RUN)
    assert third.begin(place, other_run)  # which no other upload sends
    time.sleep(1.3)
    assert not second.begin(place, RUN)  # the first goes on and on
    first.end()
    assert second.begin(place, RUN)
    second.close()  # as when it fails: its last requests may still be under way
    assert not first.begin(place, RUN)
    failing_weave.fault(403, path="/feedback/purge")  # somebody else's, perhaps protected
    time.sleep(1.3)
    assert first.begin(place, RUN)


def test_uploads_that_see_each_other_both_step_back(
    failing_weave: WeaveServer, project: str, open_target: Callable[[], WeaveTarget]
) -> None:
    announced = Barrier(2)
    targets = [open_target(), open_target()]
    place = targets[0].place(RUN, project)

    def begin(target: WeaveTarget) -> bool:
        call = target._http.call

        def together(method: str, path: str, **request: Any) -> bytes:
            answer = call(method, path, **request)
            if path == "/feedback/create":
                announced.wait(30)
            return answer

        target._http.call = together  # type: ignore[method-assign]
        return target.begin(place, RUN)

    with ThreadPoolExecutor() as pool:
        assert [*pool.map(begin, targets)] == [False, False]
    assert failing_weave.feedback(project) == []


@pytest.mark.parametrize("status", [400, 403, 501])
def test_a_server_that_takes_no_announcements_takes_the_upload_with_a_warning(
    failing_weave: WeaveServer,
    project: str,
    store: Store,
    caplog: pytest.LogCaptureFixture,
    status: int,
) -> None:
    failing_weave.fault(status, path="/feedback/")
    receipt = upload(store, Filters(), kind="weave", container=project)
    assert receipt.complete
    assert "send this run from one place at a time" in caplog.text
    assert sendings(failing_weave, project).keys() == {1}
