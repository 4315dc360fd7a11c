"""The time that an upload adds to the server's own, and the cost of sending one trace at a time.

A bare loop posts the same bodies, built beforehand, to the same server; both run in turn. At
MLflow its own client also sends the trajectories one at a time.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import localtrace
from localtrace.read.store import Store
from localtrace.store.layout import open_layout
from localtrace.store.sealing.seal import seal
from localtrace.uploader import TargetOptions, upload
from localtrace.uploader.plan import Progress
from localtrace.uploader.selection import Selection, choose
from localtrace.uploader.targets import Record, Target, open_target
from localtrace.uploader.transcripts import transcript_of
from tests.benchmarks.figures import Figure, Promise, Table

ROUNDS = 2
TRAJECTORIES = 1500
ONE_AT_A_TIME = 40
CALLS = 11
TEXT_CHARS = 3500
BARE = Promise("of a bare loop", 0.9, "x", at_least=True)
CLIENT = Promise("of one trace at a time", 5, "x", at_least=True)


def measure() -> Table:
    """Trajectories per second of an upload as multiples of the other ways."""
    with (
        tempfile.TemporaryDirectory(prefix="localtrace-bench-") as folder,
        contextlib.chdir(folder),
        localtrace.open_store(_record(Path(folder) / "store")) as store,
    ):
        os.environ["LOCALTRACE_STATE_DIR"] = f"{folder}/state"
        rows = []
        for name, server in (("mlflow", _mlflow), ("weave", _weave)):
            with server(Path(folder)) as uri:
                rows += _rows(store, name, uri)
    return Table(
        "Uploading, against the same server fed in other ways",
        ("target", "per bare loop", "with reading back", "per one at a time", "promise"),
        rows,
        [
            f"{TRAJECTORIES} trajectories of {CALLS + 1} spans and about "
            f"{CALLS * TEXT_CHARS // 1000} kB, {ROUNDS} rounds in turn (lowest to highest).",
            "An upload reads the store, redacts, maps and sends until all is accepted; the loop "
            "only posts. One at a time: MLflow's own client, against upload with reading back.",
        ],
    )


def _rows(store: Store, kind: str, uri: str) -> list[list[str]]:
    taken: dict[str, list[float]] = defaultdict(list)
    for number in range(ROUNDS + 1):
        taken["bare"].append(_bare(store, kind, uri, f"team/bare-{number}"))
        sent, read_back = _upload(store, kind, uri, f"team/upload-{number}")
        taken["upload"].append(sent)
        taken["read back"].append(read_back)
        if kind == "mlflow":
            taken["client"].append(_one_at_a_time(store, uri, f"team/client-{number}"))
    speeds = {way: Figure(tuple(speed[1:])) for way, speed in taken.items()}
    per_bare = speeds["upload"] / speeds["bare"]
    with_reading = speeds["read back"] / speeds["bare"]
    client, verdicts = "", [BARE.verdict(per_bare)]
    if "client" in speeds:
        per_client = speeds["read back"] / speeds["client"]
        client = per_client.text("x")
        verdicts.append(CLIENT.verdict(per_client))
    return [[kind, per_bare.text("x"), with_reading.text("x"), client, "; ".join(verdicts)]]


@localtrace.op
def work(text: str, number: int) -> dict[str, Any]:
    return {"text": text, "number": number}


def _record(folder: Path) -> Path:
    localtrace.init(folder, project="bench", min_free_bytes=0, seal=False)
    for number in range(TRAJECTORIES):
        with localtrace.trajectory(step=number // 50, sample_index=number, rollout_n=0) as t:
            for call in range(CALLS):
                work("abcdefg " * (TEXT_CHARS // 16), call)
            t.set(reward=number / TRAJECTORIES)
    localtrace.close()
    seal(open_layout(folder))
    return folder


def _upload(store: Store, kind: str, uri: str, container: str) -> tuple[float, float]:
    """Trajectories per second until all are accepted, and until all are read back."""
    ended_s = 0.0

    def on_progress(progress: Progress) -> None:
        nonlocal ended_s
        ended_s = time.perf_counter()

    began_s = time.perf_counter()
    receipt = upload(
        store, Selection(), uri, kind=kind, container=container, on_progress=on_progress
    )
    assert receipt.counts["sent"] == receipt.counts["verified"] == TRAJECTORIES
    read_back_s = time.perf_counter()
    return TRAJECTORIES / (ended_s - began_s), TRAJECTORIES / (read_back_s - began_s)


def _bare(store: Store, kind: str, uri: str, container: str) -> float:
    with closing(open_target(kind, uri, TargetOptions())) as target:
        target.check()
        batches = _batches(store, target, container)
        began_s = time.perf_counter()
        for batch in batches:
            target.send(batch)
        return TRAJECTORIES / (time.perf_counter() - began_s)


def _batches(store: Store, target: Target, container: str) -> list[list[Record]]:
    (part,) = choose(store, Selection()).runs
    place = target.place(part.run, container)
    batches: list[list[Record]] = [[]]
    for trajectory in store.read(part.trace_ids):
        record = target.encode(trajectory, place, transcript_of(trajectory))
        full = [*batches[-1], record]
        too_many = sum(len(one.parts) for one in full) > target.batch_max_parts
        if batches[-1] and (
            too_many or sum(one.size_bytes for one in full) > target.batch_max_bytes
        ):
            batches.append([])
        batches[-1].append(record)
    return batches


def _one_at_a_time(store: Store, uri: str, container: str) -> float:
    """MLflow's own client: begin a trace, begin and end each span, end the trace."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment_id = client.create_experiment(container)
    (part,) = choose(store, Selection(limit=ONE_AT_A_TIME)).runs
    trajectories = list(store.read(part.trace_ids))
    began_s = time.perf_counter()
    for trajectory in trajectories:
        root = client.start_trace("agent_loop", experiment_id=experiment_id)
        for span in trajectory.spans:
            call = client.start_span(
                span.op, root.trace_id, root.span_id, inputs=span.inputs,
                start_time_ns=span.start_ns,
            )  # fmt: skip
            client.end_span(root.trace_id, call.span_id, outputs=span.outputs)
        client.end_trace(root.trace_id)
    return ONE_AT_A_TIME / (time.perf_counter() - began_s)


@contextlib.contextmanager
def _mlflow(folder: Path) -> Iterator[str]:
    from localtrace.uploader.targets.mlflow_server import EmbeddedServer

    os.environ["MLFLOW_ENABLE_ASYNC_TRACE_LOGGING"] = "false"
    with closing(EmbeddedServer(folder / "mlflow.db")) as server:
        yield server.url


@contextlib.contextmanager
def _weave(folder: Path) -> Iterator[str]:
    from tests.servers.weave import WeaveServer

    server = WeaveServer(folder)
    os.environ |= server.environment
    server.start()
    try:
        yield server.url
    finally:
        server.end()
