"""The stores on the disks of Ray's nodes: one actor per living node reads and seals there.

Bytes come through Ray's object store in pieces, a few of them at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

from localtrace.cluster.folder_store import PIECE_BYTES, FolderStore
from localtrace.cluster.gather import GatherReport, OnProgress, gather_from, reported
from localtrace.errors import ConfigError, MissingDependency, StoreError, StoreNotFound
from localtrace.store.layout import StoreLayout
from localtrace.store.sealing.seal import seal

_PIECES_AHEAD = 2
_ANSWER_MAX_S = 600.0
_SEAL_WAIT_S = 60.0
_ID_CHARS = 8


class _Reader:
    """The actor on a node, which reads its store for the gathering process."""

    def open(self, path: str) -> tuple[str, str] | None:
        """Seal what is ready; return the store's place and id, None where there is no store."""
        try:
            self._store = FolderStore(os.path.expanduser(os.path.expandvars(path)))
        except StoreNotFound:
            return None
        with contextlib.suppress(StoreError):  # the node's own sealer is at it
            seal(self._store.layout, wait_s=_SEAL_WAIT_S)
        return self._store.place, self._store.store_id

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the store."""
        return getattr(self._store, method)(*args)


class NodeStore:
    """A store on the disk of one of Ray's nodes: a `Source` that asks the actor there."""

    def __init__(self, reader: Any, place: str, store_id: str) -> None:
        self._reader = reader
        self.place = place
        self.store_id = store_id
        self.survey = partial(self._ask, "survey")
        self.others = partial(self._ask, "others")
        self.waiting = partial(self._ask, "waiting")
        self.note = partial(self._ask, "note")

    def read(self, name: str, size_bytes: int) -> Iterator[bytes]:
        """Yield the bytes of a file, named relative to the store, in pieces."""
        coming: deque[Any] = deque()
        for start in range(0, size_bytes, PIECE_BYTES):
            coming.append(self._reader.ask.remote("piece", name, size_bytes, start))
            if len(coming) > _PIECES_AHEAD:
                yield _answer(coming.popleft())
        while coming:
            yield _answer(coming.popleft())

    def _ask(self, method: str, *args: Any) -> Any:
        return _answer(self._reader.ask.remote(method, *args))


def _answer(reference: Any) -> Any:
    """Return what an actor answers, or raise its own error.

    Raises:
        StoreError: it did not answer.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(reference, timeout=_ANSWER_MAX_S)
    except RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise StoreError(f"did not answer ({error})") from error
    except RayError as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise StoreError(f"did not answer ({reason[0]}): gather again when it is back") from error


def gather_nodes(
    path: str, into: StoreLayout, report: GatherReport, on_progress: OnProgress | None = None
) -> None:
    """Seal and gather the stores of all nodes of the Ray cluster, and add to a report.

    A node without a store is passed over. One that is dead, or does not answer, is a problem of
    the report and costs only itself.

    Args:
        path: the folder of the store on each node; `~` and variables are those of the node.
        into: the store that gets the rows, in a folder of this node.
        report: gets the result.
        on_progress: called with bytes that have come and bytes known to be new.

    Raises:
        ConfigError: there is no cluster.
        MissingDependency: Ray is not installed.
    """
    living, dead = _nodes()
    opened = {}
    for name, node_id in living.items():
        reader = _reader_on(node_id)
        opened[name] = reader, reader.open.remote(path)
    found = 0
    for name, (reader, answer) in opened.items():
        with reported(report, name):
            store = _answer(answer)
            if store is not None:
                found += 1
                source = NodeStore(reader, f"{name}:{store[0]}", store[1])
                gather_from(source, into, report, on_progress)
        _end(reader)
    for name in dead:
        report.failed += 1
        report.problems.append(
            f"{name}: not gathered: the node is dead; what its disk holds can be gathered when it "
            "is back, or from a copy of its store"
        )
    if not found:
        report.problems.append(f"none of {len(living)} nodes has a store at {path}")


def _nodes() -> tuple[dict[str, str], list[str]]:
    """Return the ids of living nodes by name, and the names of dead ones that did not come back."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependency("ray is not installed: run  pip install ray") from error
    if not ray.is_initialized():
        try:
            ray.init("auto", log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ray.exceptions.RayError) as error:
            raise ConfigError(
                f"no Ray cluster answers ({str(error).splitlines()[0]}): run this on one of its "
                "nodes, or set RAY_ADDRESS, and RAY_AUTH_MODE=token where it asks for a token"
            ) from error
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    names = {node["NodeName"] for node in nodes if node["Alive"]}
    living = {_name(node): node["NodeID"] for node in nodes if node["Alive"]}
    dead = [_name(one) for one in nodes if not one["Alive"] and one["NodeName"] not in names]
    return living, dead


def _name(node: dict[str, Any]) -> str:
    return f"node {node['NodeID'][:_ID_CHARS]} ({node['NodeName']})"


def _reader_on(node_id: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(_Reader).options(num_cpus=0, scheduling_strategy=there).remote()


def _end(reader: Any) -> None:
    import ray

    with contextlib.suppress(Exception):  # it is gone already
        ray.kill(reader)
