"""Files that take the place of others, and the deletion of those others after a grace period.

What a commit replaces is noted before it, in `_replaced/` beside the table's log. The log itself
names replaced files for minutes only, since every commit costs more with each of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from deltalake import Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction

from localtrace.errors import StoreError, StoreFormatError
from localtrace.schema import TableSchema
from localtrace.store.files import is_file, put_file, read_json
from localtrace.store.layout import REPLACED, StoreLayout
from localtrace.store.tables.delta import (
    COMMIT_TRIES_MAX,
    CommittedFile,
    adding,
    committed_files,
    committed_number,
    inside,
    open_table,
    with_all_columns,
    write,
)
from localtrace.store.tables.log_files import sync_log
from localtrace.store.tables.parquet_files import WrittenFile, partition_values

GRACE_HOURS = 24
"""Time for which replaced files stay, for readers of an earlier state."""
_REWRITES = "localtrace.rewrites"
"""Application id that all rewriting commits share: of two at once, delta-rs refuses one."""
_REFUSED = (
    "cannot commit to table {} ({}): its files stay as they are; run localtrace compact again"
)
_NOTE_NAME = re.compile(r"(\d{20})-[0-9a-f]{32}\.json")
_TABLE_FILE = re.compile(r"v\d+-[0-9a-f]{32}\.parquet")


def replace_files(
    layout: StoreLayout,
    schema: TableSchema,
    old: Sequence[CommittedFile],
    new: Sequence[WrittenFile],
) -> bool:
    """Put files in the place of others by one commit, and sync the new log entry.

    The old files stay on the disk. delta-rs accepts two commits that replace the same file, and
    its rows are there twice. So this looks, in a table that was opened just now, whether each old
    file is still there, and all such commits share an application transaction: delta-rs refuses
    this one if another came after that look, and it looks again.

    Args:
        old: files of the table's state.
        new: already in their place and on the disk.

    Returns:
        False if an old file has been replaced meanwhile; then nothing was changed.

    Raises:
        StoreError: the commit is refused again and again.
        OSError: the note of what is replaced cannot be written; then nothing was changed.
    """
    note = _note(layout, schema, [file.path for file in old])
    problem: DeltaError | None = None
    for _ in range(COMMIT_TRIES_MAX):
        table = with_all_columns(layout, schema, open_table(layout, schema))
        state = {file.path for file in committed_files(table)}
        if new and {file.path for file in new} <= state:
            break  # the commit was done in spite of the error
        if not {file.path for file in old} <= state:
            note.unlink(missing_ok=True)
            return False
        actions: list[AddAction | RemoveAction] = [_removed(file) for file in old]
        actions += [adding(file, is_new=False) for file in new]
        rewrite = Transaction(_REWRITES, committed_number(table, _REWRITES) + 1)
        try:
            write(table, schema, actions, [rewrite])
        except CommitFailedError as error:
            problem = error
            continue
        except DeltaError as error:
            raise StoreError(_REFUSED.format(schema.name, error)) from error
        break
    else:
        raise StoreError(_REFUSED.format(schema.name, problem)) from problem
    sync_log(layout, schema)
    return True


def _removed(file: CommittedFile) -> RemoveAction:
    return RemoveAction(
        path=file.path,
        data_change=False,
        deletion_timestamp=_now_ms(),
        size=file.size_bytes,
        partition_values=partition_values(file.folder),
    )


def _note(layout: StoreLayout, schema: TableSchema, paths: Sequence[str]) -> Path:
    name = f"{_now_ms():020}-{uuid.uuid4().hex}.json"
    path = layout.table(schema.name) / REPLACED / name
    put_file(path, msgspec.json.encode(paths))
    return path


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class _Note:
    """Files that a commit was to replace; one that was killed may have left them in place."""

    place: Path
    time_ms: int

    def paths(self) -> set[str]:
        """Return the files, relative to the table; none where the note cannot be read."""
        with contextlib.suppress(StoreFormatError, OSError):
            return set(read_json(self.place, list[str]))
        return set()


def _notes(layout: StoreLayout, schema: TableSchema) -> list[_Note]:
    folder = layout.table(schema.name) / REPLACED
    with contextlib.suppress(FileNotFoundError):
        found = map(_NOTE_NAME.fullmatch, os.listdir(folder))
        return [_Note(folder / name[0], int(name[1])) for name in found if name]
    return []


def replaced_files(layout: StoreLayout, schema: TableSchema) -> set[Path]:
    """Return the files that are noted as replaced, and are not in the table's state.

    Raises:
        StoreError: the table cannot be opened.
    """
    noted = _all_paths(_notes(layout, schema))
    return {layout.table(schema.name) / path for path in noted - _state(layout, schema)}


def _all_paths(notes: Iterable[_Note]) -> set[str]:
    return set[str]().union(*(note.paths() for note in notes))


def _state(layout: StoreLayout, schema: TableSchema) -> set[str]:
    return {file.path for file in committed_files(open_table(layout, schema))}


def vacuum(layout: StoreLayout, schema: TableSchema, grace_hours: int) -> tuple[int, int]:
    """Delete files that were replaced before a grace period; return their number and bytes.

    Files that no note names stay: `verify` reports them, `recover` puts them aside.

    Raises:
        StoreError: the table cannot be opened.
    """
    count = size_bytes = 0
    notes, before_ms = _notes(layout, schema), _now_ms() - grace_hours * 3_600_000
    due = [note for note in notes if note.time_ms <= before_ms]
    if not due:
        return count, size_bytes
    state = _state(layout, schema)
    # A commit that was killed before it replaced them is noted too: the newest note tells the time.
    kept = state | _all_paths(note for note in notes if note.time_ms > before_ms)
    for note in due:
        paths = note.paths()
        is_done = not paths & state
        for path in sorted(paths - kept):
            try:
                size_bytes += _delete(layout.table(schema.name), path)
                count += 1
            except StoreError:
                pass  # it is gone, or a hostile note named it
            except OSError:
                is_done = False  # another user's, perhaps
        if is_done:
            note.place.unlink(missing_ok=True)
    return count, size_bytes


def _delete(root: Path, path: str) -> int:
    """Delete a table file, and return its size.

    Raises:
        StoreError: there is none; a hostile note may name other files, and links may lead to them.
        OSError: it cannot be deleted.
    """
    place = root.joinpath(*inside(path.split("/")))
    is_table_file = _TABLE_FILE.fullmatch(place.name) and os.path.lexists(place) and is_file(place)
    folder = root.resolve() / place.parent.relative_to(root)
    if not is_table_file or place.parent.resolve() != folder:
        raise StoreError(f"{place} is not a file of table {root.name}")
    size_bytes = place.stat().st_size
    place.unlink()
    return size_bytes
