"""From the records of journals to the rows of tables; the same for sealing and for live reading."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import msgspec
import pyarrow as pa

from localtrace.schema import TABLES
from localtrace.store.journal.frames import Frames
from localtrace.store.journal.journal_files import JournalName, JournalStatus
from localtrace.store.journal.plain_values import as_number, outcome_items
from localtrace.store.journal.records import (
    STATUSES,
    Begin,
    Closed,
    End,
    Envelope,
    MetricsRecord,
    Opened,
    OutcomeRecord,
    RunRecord,
    SpanCall,
    TurnCall,
    read_envelopes,
)
from localtrace.store.tables.columns import Columns
from localtrace.store.tables.damage import Damage
from localtrace.store.tables.spans import SpanReader, head_columns, started_at
from localtrace.store.tokenizers import Decode
from localtrace.values import codec
from localtrace.values.doubles import floats
from localtrace.values.encoded import raw_map
from localtrace.values.plain_json import valid_text

_FOLDER_NAME_MAX_BYTES = 240
"""Longest value of a partition: file systems allow 255 bytes, of which `experiment=` takes 11."""


class JournalRows:
    """The rows of any number of journals, by table."""

    def __init__(self, decode: Decode | None = None) -> None:
        """Begin without rows.

        Args:
            decode: turns token ids into text.
        """
        self.columns = {name: Columns(schema) for name, schema in TABLES.items()}
        self.damage = Damage()
        self.unreadable: set[JournalName] = set()
        """Journals of which a part cannot be read."""
        self._journals: list[JournalName] = []
        self._ends: dict[str, list[int]] = {name: [] for name in TABLES}
        """Number of rows after each journal, by table."""
        self.decode = decode or (lambda run_id, ids: None)

    def add_journal(self, name: JournalName, frames: Frames, status: JournalStatus) -> None:
        """Add one journal; its status tells what became of trajectories that do not end there."""
        damaged_before = self.damage.records
        self.damage.records += len(frames.damaged)
        if status is not JournalStatus.LIVE:  # else the writer is in the middle of its last frame
            self.damage.torn_tails += frames.tail_start is not None
        reader = _JournalReader(self)
        for envelope in read_envelopes(frames.payloads):
            self.damage.records += not reader.try_add(envelope)
        if status is JournalStatus.LAST or reader.closed:
            reader.end_open("interrupted")
        elif status is JournalStatus.LIVE:
            reader.end_open("running")
        self.damage.prompts += reader.lost_prompts
        self._journals.append(name)
        for table, columns in self.columns.items():
            self._ends[table].append(len(columns))
        if self.damage.records > damaged_before:
            self.unreadable.add(name)

    def tables(self) -> dict[str, pa.Table]:
        """Make tables of all rows.

        A row with a value that does not fit its column is left out, and counts as damaged.
        """
        tables = {}
        for name, columns in self.columns.items():
            tables[name], left_out = columns.table()
            self.damage.records += len(left_out)
            ends = self._ends[name]
            self.unreadable |= {self._journals[bisect_right(ends, place)] for place in left_out}
        return tables


class _JournalReader:
    """The state of reading one journal from its first record to its last."""

    def __init__(self, rows: JournalRows) -> None:
        self._rows = rows
        self._spans = SpanReader(rows.decode)
        self._open: dict[bytes, tuple[dict[str, Any], Begin]] = {}
        self._opened: dict[str, Any] = {}
        self.closed = False

    @property
    def lost_prompts(self) -> int:
        """Prompts and message lists whose base is lost."""
        return self._spans.lost_prompts

    def try_add(self, envelope: Envelope | None) -> bool:
        """Add the rows of one record; return False where localtrace did not write it."""
        try:
            if envelope is not None:
                self._add(envelope)
                return True
        except Exception:
            pass  # the other records must stay readable
        return False

    def _add(self, envelope: Envelope) -> None:
        record = envelope.record
        if not all(map(_is_folder_name, (envelope.context.project, envelope.context.experiment))):
            raise ValueError("no folder can have this name")
        common = {
            **self._opened,
            **msgspec.structs.asdict(envelope.context),
            "writer_seq": envelope.seq,
        }
        columns = self._rows.columns
        if isinstance(record, SpanCall | TurnCall):
            self._note_prompt(record)
            for row in self._spans.rows(record, envelope.context.run_id):
                columns["spans"].add(common | row)
        elif isinstance(record, Begin):
            self._open[record.head.trace_id] = (common, record)
        elif isinstance(record, End):
            self._open.pop(record.begin.head.trace_id, None)
            columns["trajectories"].add(common | _trajectory(record))
        elif isinstance(record, OutcomeRecord):
            for row in _outcomes(record):
                columns["outcomes"].add(common | row)
        elif isinstance(record, MetricsRecord):
            for name, value in record.values.items():
                row = {"step": record.step, "name": name, "value": value, "time_ns": record.time_ns}
                columns["metrics"].add(common | row)
        elif isinstance(record, RunRecord):
            columns["runs"].add(common | _run(record))
        elif isinstance(record, Opened):
            self._opened = {"writer_id": record.writer_id, "host": record.host, "pid": record.pid}
        elif isinstance(record, Closed):
            self.closed = True

    def _note_prompt(self, call: SpanCall | TurnCall) -> None:
        # The end record has the hash too, but an interrupted trajectory has no end record.
        if isinstance(call, TurnCall) and call.prompt_hash and call.head.trace_id in self._open:
            self._open[call.head.trace_id][1].prompt_hash = call.prompt_hash

    def end_open(self, status: str) -> None:
        """Give a row to every trajectory that has begun and not ended."""
        for common, begin in self._open.values():
            end = End(begin, 0, STATUSES.index(status), None, msgspec.Raw(b"\x80"), 0)
            row = _trajectory(end)
            row |= dict.fromkeys(("end_ns", "span_count", "turn_count", "output_tokens"))
            self._rows.columns["trajectories"].add(common | row)


@lru_cache
def _is_folder_name(text: str) -> bool:
    """Tell whether a partition's folder can have this name; `init` allows only shorter ones."""
    return len(quote(text, safe="")) <= _FOLDER_NAME_MAX_BYTES


def _trajectory(end: End) -> dict[str, Any]:
    begin = end.begin
    values = raw_map(end.values) or {}
    reward = as_number(codec.decode(values["reward"])) if "reward" in values else None
    if reward is not None:
        del values["reward"]
    return {
        **head_columns(begin.head),
        "group_id": begin.group_id,
        "validate": begin.validate,
        "name": begin.name,
        "agent": begin.agent,
        "data_source": begin.data_source,
        "prompt_hash": None if begin.prompt_hash is None else begin.prompt_hash.hex(),
        "status": STATUSES[end.status],
        "error": end.error,
        "start_ns": begin.start_ns,
        "end_ns": begin.start_ns + end.duration_ns,
        "started_at": started_at(begin.start_ns),
        "reward": reward,
        "span_count": end.span_count,
        "turn_count": end.turn_count,
        "output_tokens": end.output_tokens,
        "attributes": codec.msgpack_to_json(msgspec.msgpack.encode(values)),
    }


def _outcomes(record: OutcomeRecord) -> list[dict[str, Any]]:
    rows = []
    for name in record.values:
        for trace_id, item in outcome_items(record, name):
            rows.append(
                {
                    "trace_id": trace_id,
                    "step": record.step,
                    "name": name,
                    "time_ns": record.time_ns,
                    "source": record.source,
                    "folded": False,
                    **_outcome_value(item),
                }
            )
    return rows


def _outcome_value(value: Any) -> dict[str, Any]:
    if isinstance(value, array | memoryview | tuple):
        return {"values": floats(value)}
    if isinstance(value, str):
        return {"text": valid_text(value)}
    number = as_number(value)
    if number is not None:
        return {"number": number}
    return {"text": codec.to_json(value)}


def _run(record: RunRecord) -> dict[str, Any]:
    facts = {name: codec.decode(raw) for name, raw in record.facts.items()}
    for name, value in facts.items():
        if name in ("config", "versions", "losses") and value is not None:
            facts[name] = codec.to_json(value)
        elif isinstance(value, str):
            facts[name] = valid_text(value)
    return {**facts, "event": record.event, "time_ns": record.time_ns}
