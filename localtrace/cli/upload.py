"""`localtrace upload`: a selection, uploaded to a tracker exactly once."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localtrace.cli.options import store_option
from localtrace.cli.selection import REDACT_HELP, SELECTION_HELP, selection_options
from localtrace.cli.sizes import show_duration, show_size, size
from localtrace.errors import NothingChosen, QueryError, UploadError
from localtrace.printing import say

if TYPE_CHECKING:
    from localtrace.read.store import Store
    from localtrace.uploader.estimation import Estimate
    from localtrace.uploader.receipts import Receipt
    from localtrace.uploader.selection import Selection

_REASONS_SHOWN = 10


@click.command(epilog=SELECTION_HELP)
@selection_options
@click.option(
    "--to",
    "kind",
    type=click.Choice(["mlflow", "otlp", "weave"]),
    required=True,
    help="Kind of tracker.",
)
@click.option(
    "--uri",
    help="Address of the tracker: http://HOST:PORT. For mlflow also sqlite:///FILE.db; a server "
    "then runs during the upload.  [default: for mlflow MLFLOW_TRACKING_URI, else mlflow.db in "
    "this folder; for weave WF_TRACE_SERVER_URL or WANDB_BASE_URL, else W&B; for otlp "
    "OTEL_EXPORTER_OTLP_ENDPOINT]",
)
@click.option("--experiment", help="mlflow: name of the experiment.  [default: the run's project]")
@click.option(
    "--project",
    help="weave: ENTITY/NAME; otlp: name of the service.  [default: the run's project, for weave "
    "in WANDB_ENTITY]",
)
@click.option(
    "--wandb-run", metavar="ENTITY/PROJECT/RUN", help="weave: attach the traces to this W&B run."
)
@click.option(
    "--assessments",
    is_flag=True,
    help="mlflow: store rewards and right answers as assessments too (slow); weave: rewards as "
    "feedback.",
)
@click.option(
    "--metrics",
    is_flag=True,
    help="mlflow: upload the metrics and configurations of the runs too.",
)
@click.option("--redact", type=click.Path(path_type=Path), metavar="RULES", help=REDACT_HELP)
@click.option("--max-bytes", type=size, help="Send at most this much, such as 1GB.")
@click.option("--rate", type=size, help="Send at most this much per second, such as 2MB.")
@click.option("--dry-run", is_flag=True, help="Only print what would be sent and skipped.")
@click.option(
    "--receipt",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a copy of the receipt to this file.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print problems only.")
@store_option
def command(
    selection: Selection,
    uri: str | None,
    metrics: bool,
    dry_run: bool,
    receipt: Path | None,
    quiet: bool,
    store_paths: tuple[Path, ...],
    **target_options: Any,
) -> None:
    """Send trajectories to a tracker, each exactly once.

    Repeat an interrupted upload to complete it. API keys are read from the trackers' own variables
    (WANDB_API_KEY or netrc, MLFLOW_TRACKING_TOKEN, OTEL_EXPORTER_OTLP_HEADERS).
    """
    _refuse_options_of_others(metrics=metrics, **target_options)
    from localtrace.cli.upload_progress import show_progress
    from localtrace.read.store import open_store
    from localtrace.uploader import estimate, upload

    target = _target(**target_options)
    with (
        open_store(*store_paths) as store,
        _explained(store, selection),
        show_progress(quiet) as on_progress,
    ):
        target["on_progress"] = on_progress
        if dry_run:
            found = estimate(store, selection, uri, **target)
        else:
            done = upload(store, selection, uri, **target, metrics=metrics)
    if dry_run:
        _print_estimate(found)
        return
    _print_receipt(done, quiet)
    if receipt is not None:
        _copy(done, receipt)
    if done.failures or done.problems:
        sys.exit(1)


def _target(
    *,
    kind: str,
    experiment: str | None,
    project: str | None,
    wandb_run: str | None,
    assessments: bool,
    redact: Path | None,
    max_bytes: int | None,
    rate: int | None,
) -> dict[str, Any]:
    """Return the arguments that `upload` and `estimate` share, from the options of the command."""
    from localtrace.uploader import TargetOptions
    from localtrace.uploader.plan import Limits

    return {
        "kind": kind,
        "container": experiment or project,
        "options": TargetOptions(assessments, wandb_run),
        "redact": redact,
        "limits": Limits(max_bytes, rate),
    }


@contextmanager
def _explained(store: Store, selection: Selection) -> Iterator[None]:
    """Name the filter to blame for an empty selection."""
    from localtrace.cli.no_match import why_nothing

    try:
        yield
    except NothingChosen as error:
        why = why_nothing(store, selection.filters) if selection.filters.terms else str(error)
        raise QueryError(f"nothing to upload: {why}") from error


_ONLY_FOR = {
    "experiment": ("mlflow",),
    "project": ("weave", "otlp"),
    "wandb_run": ("weave",),
    "assessments": ("mlflow", "weave"),
    "metrics": ("mlflow",),
}
"""Trackers that take an option, for options that not all of them take."""


def _refuse_options_of_others(kind: str, **given: Any) -> None:
    for name, trackers in _ONLY_FOR.items():
        if given[name] and kind not in trackers:
            option = name.replace("_", "-")
            raise click.UsageError(
                f"--{option} is only for --to {' or '.join(trackers)}: leave it out"
            )


def _print_estimate(found: Estimate) -> None:
    say(
        f"{found.to_send} of {found.selected} trajectories, {show_size(found.size_bytes)}, would "
        f"go to {found.target}"
    )
    for container in found.containers:
        say(f"into        {container}")
    how = "at the speed of the last upload" if found.measured else "a guess before the first upload"
    say(f"time        about {show_duration(found.duration_s)} ({how})")
    if found.present:
        say(f"skipped     {found.present} are there already, according to the ledger")
    if found.over_limit:
        say(f"left out    {found.over_limit} for the next time: --max-bytes is reached")
    if found.cuts:
        say(f"cut         {found.cuts} values that are too long for the target")
    _print_counts("left out    ", found.left_out, "at recording")
    _print_counts("redacted    ", found.redactions)
    _print_counts("not searched ", found.unsearched, "for keys:")
    _print_rejected(found.rejected)


def _print_receipt(done: Receipt, quiet: bool) -> None:
    if not quiet:
        _print_summary(done)
    _print_rejected(done.failures)
    for problem in done.problems:
        say(problem, err=True)
    if done.failures or done.problems:
        say(f"not everything was uploaded: {_remedy(done)}", err=True)


def _copy(done: Receipt, path: Path) -> None:
    from localtrace.uploader.state import receipts_folder

    kept = receipts_folder() / f"{done.upload_id}.json"
    try:
        shutil.copyfile(kept, path)
    except OSError as error:
        raise UploadError(
            f"cannot write the copy of the receipt to {path} ({error.strerror or error}): the "
            f"upload is done, copy {kept}"
        ) from error


def _remedy(done: Receipt) -> str:
    from localtrace.read.unseen import PRUNED

    pruned = sum(reason.startswith(PRUNED) for reason in done.failures.values())
    again = "repeat the command to try again"
    if not pruned:
        return again
    leave_out = f"leave out the {pruned} without calls with 'where=spans_pruned is null'"
    is_all = pruned == len(done.failures) and not done.problems
    return leave_out if is_all else f"{leave_out}, and {again} what else failed"


def _print_summary(done: Receipt) -> None:
    from localtrace.uploader.state import receipts_folder

    n = done.counts
    checked = f"{n['verified']} read back" if done.reads_back else "accepted, not verified"
    replaced = f", of which {n['replaced']} replace an earlier version" if n["replaced"] else ""
    say(
        f"{n['selected']} trajectories: {n['sent']} sent ({show_size(n['sent_bytes'])}){replaced}, "
        f"{n['already there']} already there, {n['rejected']} rejected; {checked}"
    )
    say(f"target      {done.target}")
    for run in done.runs:
        say(f"into        {run.container}, run {run.place.run or run.run_id}{run.beside}")
        for note in run.parameter_notes:
            say(f"parameters  {note}")
    if done.double_rows:
        say(f"double rows {done.double_rows}, which the service shows until it merges them")
    if n["left out"]:
        say(f"left out    {n['left out']} for the next time: repeat the command to go on")
    _print_counts("left out    ", done.left_out, "at recording")
    _print_counts("redacted    ", done.redactions)
    _print_counts("not searched ", done.unsearched, "for keys:")
    say(f"receipt     {receipts_folder() / done.upload_id}.html")


def _print_counts(title: str, counts: Mapping[str, int], when: str = "") -> None:
    if counts:
        listed = ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
        say(f"{title}{when}{' ' if when else ''}{listed}")


def _print_rejected(reasons: Mapping[str, str]) -> None:
    for trace_id, reason in list(reasons.items())[:_REASONS_SHOWN]:
        say(f"failed {trace_id}: {reason}", err=True)
    if len(reasons) > _REASONS_SHOWN:
        say(f"and {len(reasons) - _REASONS_SHOWN} more, listed in the receipt", err=True)
