"""The program of a child that runs SQL of others; see `sandbox`.

Each query has a limit of memory by the system, besides DuckDB's own, which gives better messages.
The process ends when its parent does.
"""

from __future__ import annotations

import json
import os
import resource
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import pyarrow as pa

from localtrace.errors import StoreError
from localtrace.read.query_limits import BATCH_ROWS, Limits
from localtrace.read.runner import QueryRunner
from localtrace.read.sandbox import Offer
from localtrace.store.tokenizers import RunTokenizers

_SLACK_BYTES = 512 * 2**20
_THREAD_BYTES = 16 * 2**20
"""The stack and the memory arena of a thread."""
_FIRST_TO_GO = "1000"
"""The mark of a process that the system ends before others when there is no memory left."""
_MESSAGE_MAX = 10_000
_Request = tuple[Offer | None, str, Any]


def main() -> None:
    """Answer the queries that come by the socket in the place of stdin, until it closes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold recorded texts
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_FIRST_TO_GO)
    pipe = Connection(os.dup(0))
    requests: SimpleQueue[_Request] = SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, requests), daemon=True).start()
    runner: QueryRunner | None = None
    while True:
        offer, sql, params = requests.get()
        if offer is not None:
            if runner is not None:
                runner.close()
            runner = _runner_over(offer)
        assert runner is not None
        try:
            try:
                runner.database()
            finally:
                _note(pipe)  # it begins
            rows = runner.run(sql, params, is_own=False, tries=0)
            for start in range(0, max(len(rows), 1), BATCH_ROWS):
                pipe.send_bytes(_stream(rows.slice(start, BATCH_ROWS)))
        except Exception as error:
            message = (str(error) or type(error).__name__)[:_MESSAGE_MAX]
            _note(pipe, done=True, failed=message, is_damage=isinstance(error, StoreError))
        else:
            _note(pipe, done=True)


def _receive(pipe: Connection, requests: SimpleQueue[_Request]) -> None:
    """Take in queries; end the process, whatever it does, when the parent has closed the socket."""
    try:
        while True:
            requests.put(pipe.recv())
    finally:
        os._exit(0)


def _runner_over(offer: Offer) -> QueryRunner:
    piece_of = RunTokenizers(*offer.layouts).piece
    runner = QueryRunner(lambda: offer.stores, offer.layouts, piece_of, offer.limits)
    _limit_memory(offer.limits)
    return runner


def _note(pipe: Connection, done: bool = False, failed: str = "", is_damage: bool = False) -> None:
    note = {"done": done, "failed": failed, "is_damage": is_damage}
    pipe.send_bytes(json.dumps(note).encode())


def _stream(rows: pa.Table) -> pa.Buffer:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, rows.schema) as writer:
        writer.write_table(rows)
    return out.getvalue()


def _limit_memory(limits: Limits) -> None:
    """Limit the memory of this process to what a query may need; macOS has no such limit.

    DuckDB does not count all the memory that it uses, so half as much again is allowed. An
    allocation beyond the limit raises MemoryError, or DuckDB's own error.
    """
    with suppress(OSError), open("/proc/self/statm", "rb") as file:
        held_bytes = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        slack_bytes = _SLACK_BYTES + _THREAD_BYTES * (os.cpu_count() or 1)
        most_bytes = held_bytes + limits.memory_max_bytes * 3 // 2 + slack_bytes
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        if hard != resource.RLIM_INFINITY:
            most_bytes = min(most_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, hard))


if __name__ == "__main__":
    main()
