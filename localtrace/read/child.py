"""The program of a child that runs SQL of others; see `children`.

It has given up the right to change files but those of its own folder, and to open connections. Each
query has a limit of memory and of processor time by the system, besides DuckDB's own, which give
better messages. The process ends when its parent does.
"""

from __future__ import annotations

import math
import os
import pickle
import resource
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pyarrow as pa

from localtrace.errors import StoreError
from localtrace.read.children import Note, Offer
from localtrace.read.query_limits import Limits
from localtrace.read.runner import QueryRunner
from localtrace.store.tokenizers import RunTokenizers

_SLACK_BYTES = 512 * 2**20
_THREAD_BYTES = 16 * 2**20
"""The stack and the memory arena of a thread."""
_SLACK_S = 60
_FIRST_TO_GO = "1000"
"""The mark of a process that the system ends before others when there is no memory left."""
_SAID_MAX = 10_000
_STDIN = 0


def main(folder: str) -> None:
    """Answer the queries that come by the socket in the place of stdin, until it closes.

    Args:
        folder: the folder for temporary files; empty where there is none.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold recorded texts
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_FIRST_TO_GO)
    pipe = Connection(os.dup(_STDIN))
    asked: SimpleQueue[tuple[Offer | None, str, Any]] = SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, asked), daemon=True).start()
    answering = _Answering(pipe, Path(folder) if folder else None)
    while True:
        answering.answer(*asked.get())


def _receive(pipe: Connection, asked: SimpleQueue[tuple[Offer | None, str, Any]]) -> None:
    """Take in queries; end the process, whatever it does, when the parent has closed the socket."""
    try:
        while True:
            asked.put(pickle.loads(pipe.recv_bytes()))
    finally:
        os._exit(0)


class _Answering:
    """Queries answered one after the other."""

    def __init__(self, pipe: Connection, folder: Path | None) -> None:
        self._pipe = pipe
        self._folder = folder
        self._sending = threading.Lock()
        self._runner: QueryRunner | None = None

    def answer(self, offer: Offer | None, sql: str, params: Any) -> None:
        """Run one SELECT, and send its rows or why it failed."""
        failed, is_damage = None, False
        try:
            try:
                runner = self._runner_over(offer)
            finally:
                self._note(Note())  # it begins
            _limit_processor_time(runner.limits)
            runner.run(sql, params, is_own=False, tries=0)
        except Exception as error:
            failed, is_damage = str(error) or type(error).__name__, isinstance(error, StoreError)
            failed = failed[:_SAID_MAX].encode("utf-8", "replace").decode()
        self._note(Note(True, None, failed, is_damage))

    def _runner_over(self, offer: Offer | None) -> QueryRunner:
        if offer is None and self._runner is not None:
            return self._runner
        assert offer is not None
        if self._runner is not None:
            self._runner.close()
        self._runner = QueryRunner(
            lambda: offer.stores, offer.layouts, RunTokenizers(*offer.layouts).piece, offer.limits,
            lambda share: self._note(Note(share=share)), self._hand_over, self._folder,
        )  # fmt: skip
        _limit_memory(offer.limits)
        return self._runner

    def _hand_over(self, batches: pa.RecordBatchReader, limits: Limits) -> pa.Table:
        """Send all rows of a result, and return none."""
        self._rows(batches.schema, [])
        size_bytes = 0
        for batch in batches:
            size_bytes += batch.nbytes
            limits.check_size(size_bytes)
            self._rows(batches.schema, [batch])
        return batches.schema.empty_table()

    def _rows(self, schema: pa.Schema, batches: list[pa.RecordBatch]) -> None:
        made = pa.BufferOutputStream()
        with pa.ipc.new_stream(made, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        self._send(made.getvalue())

    def _note(self, note: Note) -> None:
        self._send(msgspec.json.encode(note))

    def _send(self, data: bytes | pa.Buffer) -> None:
        with self._sending:
            self._pipe.send_bytes(data)


def _limit_memory(limits: Limits) -> None:
    """Limit the memory of this process to what a query may need; macOS has no such limit.

    DuckDB does not count all the memory that it uses, so half as much again is allowed. An
    allocation beyond the limit raises MemoryError, or DuckDB's own error.
    """
    with suppress(OSError), open("/proc/self/statm", "rb") as file:
        held_bytes = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        slack_bytes = _SLACK_BYTES + _THREAD_BYTES * (os.cpu_count() or 1)
        _lower(resource.RLIMIT_DATA, held_bytes + limits.memory_max_bytes * 3 // 2 + slack_bytes)


def _limit_processor_time(limits: Limits) -> None:
    """End this process by the system should nobody be left to do so."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most_s = (limits.timeout_s + _SLACK_S) * (os.cpu_count() or 1)
    _lower(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + most_s))


def _lower(what: int, most: int) -> None:
    """Set the soft limit, which may rise again, within the hard one."""
    hard = resource.getrlimit(what)[1]
    known = [limit for limit in (most, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(what, (min(known), hard))
