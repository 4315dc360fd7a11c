"""How an upload tells where it is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from localtrace.cli.sizes import show_size

if TYPE_CHECKING:
    from localtrace.uploader.tally import Progress

LINE_INTERVAL_S = 10.0


@contextmanager
def show_progress(quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """Give the function to call after each trajectory; all output goes to stderr."""
    if quiet:
        yield lambda progress: None
    elif not sys.stderr.isatty():
        yield _Lines()
    else:
        from tqdm import tqdm

        with tqdm(unit=" trajectories", leave=False, smoothing=0.05) as bar:

            def show(progress: Progress) -> None:
                bar.total = progress.total
                bar.set_postfix_str(show_size(progress.sent_bytes), refresh=False)
                bar.update(progress.done - bar.n)

            yield show


class _Lines:
    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._next_s = self._began_s + LINE_INTERVAL_S

    def __call__(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + LINE_INTERVAL_S
        left_s = (progress.total - progress.done) * (now_s - self._began_s) / progress.done
        click.echo(
            f"{progress.done} of {progress.total} trajectories, "
            f"{show_size(progress.sent_bytes)}, about {left_s:.0f} s left",
            err=True,
        )
