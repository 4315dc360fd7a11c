"""The progress of an upload: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from localtrace.cli.sizes import show_duration, show_size
from localtrace.printing import bar, say
from localtrace.terminal import escape_line

if TYPE_CHECKING:
    from localtrace.uploader.plan import Progress

LINE_INTERVAL_S = 10.0
WINDOW_S = 30.0
"""The rate is measured over this time: what was skipped at first would make it too high."""
MEANINGFUL_S = 5.0
"""The remaining time is shown after this time only."""
_BAR = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} trajectories [{elapsed}{postfix}]"


@contextmanager
def show_progress(quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Give a function to call after each trajectory; it prints to stderr."""
    if quiet:
        yield lambda progress: None
    elif not sys.stderr.isatty():
        yield _Lines()
    else:
        with bar(leave=False, bar_format=_BAR) as shown:
            remaining = Remaining()

            def show(progress: Progress) -> None:
                shown.total = progress.total
                said = [
                    show_size(progress.sent_bytes),
                    _left(remaining(progress, time.monotonic())),
                ]
                shown.set_postfix_str(", ".join(filter(None, said)), refresh=False)
                doing = f"{escape_line(progress.doing)} " if progress.doing else ""
                shown.set_description_str(doing, refresh=bool(doing))
                shown.update(progress.done - shown.n)

            yield show


class Remaining:
    """The remaining time of an upload, estimated from its recent speed."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def __call__(self, progress: Progress, now_s: float) -> float | None:
        """Return the remaining seconds, or None while they cannot be estimated."""
        if progress.doing or not progress.done:
            self._seen.clear()
            return None
        self._seen.append((now_s, progress.done))
        while self._seen[0][0] < now_s - WINDOW_S:
            self._seen.popleft()
        began_s, done_before = self._seen[0]
        took_s, done = now_s - began_s, progress.done - done_before
        if took_s < MEANINGFUL_S or not done:
            return None
        return (progress.total - progress.done) * took_s / done


class _Lines:
    def __init__(self) -> None:
        self._next_s = time.monotonic() + LINE_INTERVAL_S
        self._remaining = Remaining()

    def __call__(self, progress: Progress) -> None:
        now_s = time.monotonic()
        left_s = self._remaining(progress, now_s)
        is_first = bool(progress.doing) and not progress.done
        if now_s < self._next_s and not is_first:
            return
        self._next_s = now_s + LINE_INTERVAL_S
        said = [
            f"{progress.done} of {progress.total} trajectories",
            show_size(progress.sent_bytes),
            _left(left_s),
        ]
        line = progress.doing if is_first else ", ".join(filter(None, [*said, progress.doing]))
        say(line, err=True)


def _left(left_s: float | None) -> str:
    return "" if left_s is None else f"about {show_duration(left_s)} left"
