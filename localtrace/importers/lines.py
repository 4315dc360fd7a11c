"""Files of one JSON object per line, read a line at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from localtrace.errors import ConfigError
from localtrace.store.files import open_given

LINE_MAX_BYTES = 64 * 2**20
"""Longer lines are not rollouts, and would not fit into a record."""
_PIECE_BYTES = 2**20
OnBytes: TypeAlias = Callable[[int], None]
"""A function that is called with the count of bytes just read."""
_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file."""

    path: Path
    number: int
    """The line number, from 1."""
    data: bytes
    modified_ns: int
    """The file's modification time, ns since the Unix epoch."""
    is_too_long: bool = False

    @property
    def place(self) -> str:
        """The file and line number, as messages name them."""
        return f"{self.path}:{self.number}"

    def fields(self) -> dict[str, Any]:
        """Return the JSON object on the line.

        Raises:
            BadLine: the line holds no JSON object.
        """
        if self.is_too_long:
            raise BadLine(f"longer than {LINE_MAX_BYTES // 2**20} MiB")
        found = read_json(self.data)
        if not isinstance(found, dict):
            raise BadLine("not a JSON object")
        return found

    def is_object(self) -> bool:
        """Tell whether the line holds a JSON object."""
        try:
            self.fields()
        except BadLine:
            return False
        return True


class BadLine(Exception):
    """A line or row that cannot be imported; the message says why."""


def read_json(data: bytes | str) -> Any:
    """Read JSON, including NaN and lone surrogates, which Python writes.

    Raises:
        BadLine: it is not JSON.
    """
    if not isinstance(data, bytes | str):  # a column of SQLite may hold anything
        raise BadLine("not text")
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeError):
        pass
    except RecursionError:
        raise BadLine("nested too deeply") from None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise BadLine("not JSON") from None


def find_files(paths: Iterable[Path], pattern: str) -> list[Path]:
    """Return the given files, and the files of given folders that match a pattern, each once.

    Files of a folder named by numbers come in the order of the numbers, which are steps.

    Raises:
        ConfigError: a path does not exist, or cannot be read as a file, or a folder holds no such
            file.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(f"there is no {path}: name files, or folders that hold {pattern}")
        # A folder or a pipe of such a name holds no lines.
        held = (one for one in path.glob(pattern) if one.is_file())
        files = sorted(held, key=_in_order) if path.is_dir() else [path]
        if not files:
            raise ConfigError(f"{path} holds no {pattern}: name another folder, or the files")
        for file in files:
            _check_readable(file, pattern)
        found |= dict.fromkeys(file.resolve() for file in files)
    return list(found)


def _check_readable(file: Path, pattern: str) -> None:
    try:
        open_given(file).close()
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}): name files, or folders that hold {pattern}"
        ) from None


def _in_order(path: Path) -> tuple[bool, int, str]:
    stem = path.stem
    is_number = stem.isdecimal() and len(stem) < 20
    return not is_number, int(stem) if is_number else 0, path.name


def read_whole(path: Path) -> Line:
    """Return a file as if it were one line."""
    with path.open("rb") as file:
        data = file.read(LINE_MAX_BYTES + 1)
    return Line(path, 1, data, path.stat().st_mtime_ns, len(data) > LINE_MAX_BYTES)


def read_documents(path: Path, on_bytes: OnBytes = lambda count: None) -> Iterator[Line]:
    """Yield the documents of a file: one per line, or the whole file if it is one of many lines."""
    lines = read_lines([path], on_bytes)
    first = next(lines, None)
    if first is None:
        return
    if (
        path.suffix == ".jsonl"
        or first.is_too_long
        or first.is_object()
        or (second := next(lines, None)) is None
    ):
        yield first
    elif second.is_object():
        yield from (first, second)
    else:
        yield read_whole(path)
        return
    yield from lines


def read_lines(paths: Iterable[Path], on_bytes: OnBytes) -> Iterator[Line]:
    """Yield every line that is not empty, one in memory at a time.

    Args:
        on_bytes: called with the number of bytes of each read.
    """
    for path in paths:
        modified_ns = path.stat().st_mtime_ns
        number = 0
        with path.open("rb") as file:
            while data := file.readline(LINE_MAX_BYTES + 1):
                number += 1
                on_bytes(len(data))
                is_too_long = len(data) > LINE_MAX_BYTES
                while is_too_long and not data.endswith(b"\n"):
                    data = file.readline(_PIECE_BYTES)
                    on_bytes(len(data))
                    if not data:
                        break
                if is_too_long or not data.isspace():
                    data = b"" if is_too_long else data.rstrip(b"\r\n")
                    yield Line(path, number, data, modified_ns, is_too_long)
