"""The files of one import, as every format gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from localtrace.importers.intake import Report
from localtrace.importers.lines import Line, read_lines


@dataclass(frozen=True, slots=True)
class Source:
    """The files of one import, and where its progress and problems go."""

    files: list[Path]
    run_id: str
    report: Report
    on_bytes: Callable[[int], None] = lambda count: None
    """A function that is called with the count of bytes just read."""

    def lines(self) -> Iterator[Line]:
        """Read the files line by line."""
        return read_lines(self.files, self.on_bytes)

    def whole_files(self) -> Iterator[Path]:
        """Yield the files; each counts as read when the next is asked for."""
        for path in self.files:
            yield path
            self.on_bytes(path.stat().st_size)
