"""Metrics of rollout servers, from real HTTP servers with prometheus_client's own output."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

import localtrace
from localtrace.trainer_hooks.verl import prometheus, tracking, workers
from tests.environment import unavailable
from tests.recording import Recording
from tests.verl.tracking.conftest import MakeTracking, recorded

try:
    import verl  # noqa: F401
    from prometheus_client import (
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        Summary,
        generate_latest,
    )
except ImportError as error:
    unavailable(str(error))


class Server:
    """A rollout server's metrics page on a loopback port."""

    def __init__(self) -> None:
        self.status, self.body, self.headers = 200, b"", {"Content-Type": "text/plain"}
        self.asked = 0
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page.asked += 1
                self.send_response(page.status if self.path == "/metrics" else 418)
                for name, value in page.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(page.body)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[Server]]]:
    """Starts servers that an agent loop manager of this process knows."""
    started: list[Server] = []

    def start(count: int) -> list[Server]:
        started.extend(Server() for _ in range(count))
        manager = SimpleNamespace(server_addresses=[one.address for one in started])
        monkeypatch.setattr(workers, "managers", [manager])
        return started

    yield start
    for one in started:
        one.http.shutdown()
        one.http.server_close()


Serve = Callable[[int], list[Server]]


def sampled() -> None:
    """Wait for the thread that asks."""
    thread = tracking._sampler._thread
    if thread is not None:
        thread.join(60)


def log_steps(loggers: Any, *steps: int) -> None:
    """Log something for each step, and wait for the servers each time."""
    for step in steps:
        loggers.log(data={}, step=step)
        sampled()


def test_gauges_counters_and_sums_are_recorded_per_server_and_step(
    make_tracking: MakeTracking, store: Recording, serve: Serve
) -> None:
    registry = CollectorRegistry()
    running = Gauge("running", "now", ["model_name", "engine"], registry=registry)
    running.labels("tiny", "0").set(4)
    Counter("tokens", "so far", ["model_name"], registry=registry).labels("tiny").inc(128)
    Summary("wait_seconds", "of a request", registry=registry).observe(0.5)
    Histogram("first_token_seconds", "of a request", registry=registry).observe(0.25)
    first, second = serve(2)
    first.body = generate_latest(registry)
    second.body = b"# TYPE running gauge\nrunning 7\n"
    loggers = make_tracking("localtrace")
    log_steps(loggers, 1)
    running.labels("tiny", "0").set(5)
    first.body = generate_latest(registry)
    log_steps(loggers, 2)
    found = {(step, name): value for step, name, value in recorded(store)}
    steady = {
        "prometheus/0/tokens_total": 128,
        "prometheus/0/wait_seconds_count": 1,
        "prometheus/0/wait_seconds_sum": 0.5,
        "prometheus/0/first_token_seconds_count": 1,
        "prometheus/0/first_token_seconds_sum": 0.25,
        "prometheus/1/running": 7,
    }
    assert found == {
        **{(step, name): value for step in (1, 2) for name, value in steady.items()},
        (1, 'prometheus/0/running{engine="0"}'): 4,
        (2, 'prometheus/0/running{engine="0"}'): 5,
    }


def test_a_step_that_is_logged_twice_is_sampled_once(
    make_tracking: MakeTracking, serve: Serve
) -> None:
    (server,) = serve(1)
    server.body = b"a 1\n"
    log_steps(make_tracking("localtrace"), 1, 1, 2)
    assert server.asked == 2


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        pytest.param(404, b"a 1\n", {}, id="no such page"),
        pytest.param(200, b"<html>hello</html>", {}, id="something else"),
        pytest.param(200, b"a 1\n" * 2**21, {}, id="more than the limit"),
        pytest.param(302, b"", {"Location": "/elsewhere"}, id="a redirection"),
    ],
)
def test_a_server_without_usable_metrics_is_left_alone_after_three_tries(
    make_tracking: MakeTracking,
    store: Recording,
    serve: Serve,
    status: int,
    body: bytes,
    headers: dict[str, str],
) -> None:
    bad, good = serve(2)
    bad.status, bad.body, bad.headers = status, body, headers
    good.body = b"a 1\n"
    log_steps(make_tracking("localtrace"), 1, 2, 3, 4, 5)
    assert (bad.asked, good.asked) == (3, 5)
    assert {name for _, name, _ in recorded(store)} == {"prometheus/1/a"}
    assert localtrace.losses()["records"] == {}


def test_a_server_that_is_gone_is_no_loss(
    make_tracking: MakeTracking, store: Recording, serve: Serve
) -> None:
    (server,) = serve(1)
    server.http.shutdown()
    server.http.server_close()
    log_steps(make_tracking("localtrace"), 1, 2, 3, 4)
    assert recorded(store) == []
    assert localtrace.losses()["records"] == {}


def test_a_server_that_never_answers_is_not_waited_for(
    make_tracking: MakeTracking, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(prometheus, "_fetch", lambda address: answer.wait(60) and "")
    serve(1)
    loggers = make_tracking("localtrace")
    for step in (1, 2, 3):
        loggers.log(data={}, step=step)
    asking = tracking._sampler._thread
    assert asking is not None
    assert asking.is_alive()
    assert asking.daemon
    answer.set()
    sampled()


def test_proxies_are_not_asked(
    make_tracking: MakeTracking, store: Recording, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, proxy = serve(2)
    server.body, proxy.status = b"a 1\n", 404
    monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
    monkeypatch.setattr(workers, "managers", [SimpleNamespace(server_addresses=[server.address])])
    log_steps(make_tracking("localtrace"), 1)
    assert recorded(store) == [(1, "prometheus/0/a", 1.0)]
    assert proxy.asked == 0


def test_servers_are_not_asked_when_nothing_is_recorded(
    make_tracking: MakeTracking, serve: Serve
) -> None:
    (server,) = serve(1)
    log_steps(make_tracking("file"), 1, 2)
    assert server.asked == 0


def test_the_addresses_are_those_of_verls_server_manager() -> None:
    from omegaconf import OmegaConf

    try:
        from verl.workers.rollout.llm_server import LLMServerManager
    except ImportError:
        pytest.skip("before 0.8 the agent loop manager has the addresses")

    class Manager(LLMServerManager):  # type: ignore[misc]
        rollout_replica_class = None

    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"nnodes": 1}, "model": {}}})
    manager = Manager(config)
    assert prometheus.server_addresses() == []
    manager.server_addresses = ["10.0.0.1:8000", "[::1]:8000"]
    assert prometheus.server_addresses() == manager.get_addresses()
