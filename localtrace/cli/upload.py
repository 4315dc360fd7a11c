"""`localtrace upload`: a selection into a tracker, exactly once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localtrace.cli.options import FILTERS_HELP, store_option
from localtrace.terminal import escape_line

if TYPE_CHECKING:
    from localtrace.uploader.receipt import Receipt
    from localtrace.uploader.records import Estimate
    from localtrace.uploader.replay import Progress

_LINE_INTERVAL_S = 10.0
_REASONS_SHOWN = 10


def _default_uri() -> str:
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


@click.command(epilog=FILTERS_HELP)
@click.argument("filters", nargs=-1, metavar="[FILTER]...")
@click.option("--run", help="A whole run; filters narrow it down.")
@click.option("--to", "kind", type=click.Choice(["mlflow"]), required=True, help="The tracker.")
@click.option(
    "--uri",
    default=_default_uri,
    help="Its address: http://HOST:PORT, or sqlite:///FILE.db, for which a server is started as "
    "long as the upload takes.  [default: MLFLOW_TRACKING_URI, else mlflow.db in this folder]",
)
@click.option("--experiment", help="Its name at the tracker.  [default: the project]")
@click.option("--assessments", is_flag=True, help="Rewards as assessments too, which is slower.")
@click.option("--limit", type=click.IntRange(1), help="At most this many trajectories.")
@click.option("--dry-run", is_flag=True, help="Only count what would be sent.")
@click.option("--receipt", type=click.Path(path_type=Path), help="Write the receipt here too.")
@store_option
def command(
    filters: tuple[str, ...],
    run: str | None,
    kind: str,
    uri: str,
    experiment: str | None,
    assessments: bool,
    limit: int | None,
    dry_run: bool,
    receipt: Path | None,
    store_path: Path,
) -> None:
    """Send trajectories to a tracker, each exactly once.

    An upload that was cut off goes on when the same command is repeated.
    """
    if not filters and run is None:
        raise click.UsageError("say what to upload: --run RUN, or a filter such as step=3..10")
    from localtrace.filters import Filters
    from localtrace.reader import open_store
    from localtrace.uploader import estimate, upload

    selection = Filters.parse([*filters, *([] if run is None else [f"run={run}"])])
    with open_store(store_path) as store:
        if dry_run:
            found = estimate(store, selection, uri, kind=kind, assessments=assessments, limit=limit)
            _print_estimate(found)
            return
        with _progress() as on_progress:
            done = upload(
                store,
                selection,
                uri,
                kind=kind,
                experiment=experiment,
                assessments=assessments,
                limit=limit,
                on_progress=on_progress,
            )
    if receipt is not None:
        done.write(receipt)
    _print_receipt(done)
    if not done.complete:
        sys.exit(1)


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, a line now and then elsewhere; both on stderr."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from tqdm import tqdm

    with tqdm(unit="trajectory", leave=False) as bar:

        def show(progress: Progress) -> None:
            bar.total = progress.total
            bar.set_postfix_str(f"{_size(progress.sent_bytes)} sent", refresh=False)
            bar.update(progress.done - bar.n)

        yield show


class _Lines:
    def __init__(self) -> None:
        self._next_s = time.monotonic() + _LINE_INTERVAL_S

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _LINE_INTERVAL_S
        size = _size(progress.sent_bytes)
        click.echo(f"{progress.done} of {progress.total} trajectories, {size} sent", err=True)


def _print_estimate(found: Estimate) -> None:
    sendable = found.selected - len(found.rejected)
    size = _size(found.size_bytes)
    click.echo(f"{sendable} trajectories, {size}, would go to {escape_line(found.target)}")
    _print_rejected(found.rejected)


def _print_receipt(done: Receipt) -> None:
    from localtrace.uploader.state import state_folder

    n = done.counts
    click.echo(
        f"{n['selected']} trajectories: {n['sent']} sent ({_size(n['sent_bytes'])}), "
        f"{n['already there']} already there, {n['rejected']} rejected; {n['verified']} read back"
    )
    click.echo(f"target      {escape_line(done.target)}")
    for run in done.runs:
        click.echo(escape_line(f"experiment  {run.experiment}, run {run.place.run}"))
    click.echo(f"receipt     {done.file_in(state_folder())}")
    _print_rejected({t.trace_id: t.reason for t in done.traces if t.reason is not None})
    if not done.complete:
        click.echo("not everything is there: repeat the command to try again", err=True)


def _print_rejected(reasons: Mapping[str, str]) -> None:
    for trace_id, reason in list(reasons.items())[:_REASONS_SHOWN]:
        click.echo(f"rejected {escape_line(f'{trace_id}: {reason}')}", err=True)
    if len(reasons) > _REASONS_SHOWN:
        click.echo(f"and {len(reasons) - _REASONS_SHOWN} more, see the receipt", err=True)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 10**6 else f"{size_bytes / 1e3:.1f} kB"
