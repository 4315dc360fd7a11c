"""Samples of the rollout servers' own metrics, which they offer in Prometheus' format.

A thread asks the servers, and the trainer never waits for it. Most servers are started without
metrics, so one that fails to answer in this format is not asked again after a few tries.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

from localtrace.record.losses import logger
from localtrace.record.session import log_metrics
from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.seams import Part
from localtrace.trainer_hooks.verl import workers
from localtrace.trainer_hooks.verl.job import VERL

_TIMEOUT_S = 2.0
_MAX_BYTES = 4 * 2**20
_TRIES = 3
_NOT_SAMPLED = ("_bucket", "_created")

_managers: weakref.WeakSet[Any] = weakref.WeakSet()


@VERL.around(
    "verl.workers.rollout.llm_server",
    "LLMServerManager.__init__",
    without="",  # before 0.8 the agent loop manager has the addresses
)
def _remember(self: Any) -> Part:
    _managers.add(self)
    yield


def server_addresses() -> list[str]:
    """Return `host:port` of every rollout server that this process knows."""
    known = [getattr(one, "server_addresses", ()) for one in (*_managers, *workers.managers)]
    return list(dict.fromkeys(address for addresses in known for address in addresses))


class Sampler:
    """The sampler that records the metrics of all servers once a step."""

    def __init__(self) -> None:
        self._step: Any = None
        self._thread: threading.Thread | None = None
        self._failures: Counter[str] = Counter()

    @harmless
    def sample(self, step: Any) -> None:
        """Ask the servers in the background, once per step and never twice at a time."""
        if step == self._step or (self._thread is not None and self._thread.is_alive()):
            return
        self._step = step
        # Numbered before filtering, so that a server keeps its number when others drop out.
        servers = [one for one in enumerate(server_addresses()) if self._failures[one[1]] < _TRIES]
        if servers:
            self._thread = threading.Thread(target=self._ask, args=(servers, step), daemon=True)
            self._thread.start()

    @harmless
    def _ask(self, servers: list[tuple[int, str]], step: Any) -> None:
        for number, address in servers:
            try:
                found = dict(_parse(_fetch(address)))
            except Exception as error:
                self._failures[address] += 1
                logger.debug("localtrace: no metrics from http://%s: %s", address, error)
            else:
                del self._failures[address]
                metrics = {f"prometheus/{number}/{name}": value for name, value in found.items()}
                log_metrics(metrics, step=step)


def _fetch(address: str) -> str:
    # urllib would follow proxies and redirects; this goes to the given address alone.
    with contextlib.closing(HTTPConnection(address, timeout=_TIMEOUT_S)) as connection:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"it answers with status {response.status}")
        body = response.read(_MAX_BYTES + 1)
        if len(body) > _MAX_BYTES:
            raise ValueError(f"it answers with more than {_MAX_BYTES} bytes")
        return body.decode("utf-8", "replace")


def _parse(text: str) -> Iterator[tuple[str, float]]:
    """Yield gauges, counters, and the sum and count of summaries and histograms."""
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            labels.pop("model_name", None)
            if sample.name.endswith(_NOT_SAMPLED) or "quantile" in labels:
                continue
            inner = ",".join(f'{name}="{value}"' for name, value in labels.items())
            yield (f"{sample.name}{{{inner}}}" if inner else sample.name), sample.value
