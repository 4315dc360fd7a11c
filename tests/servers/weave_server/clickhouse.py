"""Production's storage code on an embedded ClickHouse: rows of one id stay double until merged."""

from __future__ import annotations

from typing import Any

import clickhouse_connect
import sqlparse.engine.grouping
from weave.trace_server.clickhouse_trace_server_batched import ClickHouseTraceServer


class EmbeddedClickHouse(ClickHouseTraceServer):
    """W&B's own trace server over chdb, which keeps its tables in a folder."""

    def __init__(self, folder: str) -> None:
        super().__init__(host="", use_async_insert=False)
        self._folder = folder
        sqlparse.engine.grouping.MAX_GROUPING_TOKENS = None  # a migration is longer
        self._run_migrations()
        # Not of all tables: feedback is deleted by a merge, which the server waits for.
        self.ch_client.command("SYSTEM STOP MERGES calls_complete")

    def _mint_client(self, send_receive_timeout: int | None = None) -> Any:
        client = clickhouse_connect.get_client(interface="chdb", path=self._folder)
        self._ensure_database(client)
        client.database = self._database
        return client

    def rows(self, sql: str) -> list[Any]:
        """Return what a statement answers, past all of the server's own code."""
        if not sql.startswith("select"):
            self.ch_client.command(sql)
            return []
        return [*self.ch_client.query(sql).result_rows]
