"""The frame of `localtrace import`: options, progress and the report that all formats share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localtrace.cli.options import one_store, one_store_option
from localtrace.printing import say

if TYPE_CHECKING:
    from localtrace.importers.imported_rollouts import Rollout
    from localtrace.importers.intake import Intake, Report


def file_format(
    group: click.Group, name: str, module: str
) -> Callable[[Callable[..., Iterable[Rollout]]], click.Command]:
    """Make a command that imports one format of files into one run.

    Args:
        name: the command's name.
        module: the module in `localtrace.importers`. It has the PATTERN of its files' names in a
            folder, and a function `default_run_id(paths)`.

    The decorated function yields the rollouts of a `Source`; options of its own come by name.
    """

    def make(read: Callable[..., Iterable[Rollout]]) -> click.Command:
        def run(
            paths: tuple[Path, ...],
            run_id: str | None,
            project: str | None,
            experiment: str | None,
            dry_run: bool,
            store_paths: tuple[Path, ...],
            **options: Any,
        ) -> None:
            from localtrace.importers.lines import find_files
            from localtrace.importers.source import Source

            form = import_module(f"localtrace.importers.{module}")
            files = find_files(paths, form.PATTERN)
            run_id = run_id or form.default_run_id(paths)
            with _open_intake(store_paths, dry_run) as intake, _bytes_bar(files) as on_bytes:
                intake.begin_run(run_id, project=project, experiment=experiment)
                intake.add(read(Source(files, run_id, intake.report, on_bytes), **options))

        run.__doc__ = read.__doc__
        return group.command(name)(_with_options(run, getattr(read, "__click_params__", [])))

    return make


def _with_options(command: Any, of_format: list[click.Parameter]) -> Any:
    """Give a command its options; click keeps them in reverse order."""
    one_store_option(command)
    click.option("--dry-run", is_flag=True, help="Only print what would be imported and skipped.")(
        command
    )
    command.__click_params__.extend(of_format)
    click.option("--experiment", help="Experiment of the run.  [default: default]")(command)
    click.option("--project", help="Project of the run.  [default: default]")(command)
    click.option("--run", "run_id", metavar="ID", help="Run that the rollouts belong to.")(command)
    path = click.Path(path_type=Path)
    return click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=path)(command)


@contextmanager
def _open_intake(store_paths: tuple[Path, ...], dry_run: bool) -> Iterator[Intake]:
    """Open the store for an import; when all was read, seal it and print a report."""
    from localtrace.cli.progress import print_problems, progress_bar
    from localtrace.importers.intake import Intake

    store = one_store(store_paths)
    with Intake(store, dry_run=dry_run) as intake:
        yield intake
        with progress_bar("sealing", " journals") as progress:
            intake.finish(progress)
    _print(intake.report, store, "would be imported" if dry_run else "imported")
    print_problems(click.get_current_context(), intake.report.problems)


def _print(report: Report, store: Path, what: str) -> None:
    parts = [f"{report.trajectories} trajectories", f"{report.calls} calls"]
    if report.outcomes:
        parts.append(f"{report.outcomes} outcomes")
    say(f"{', '.join(parts)} {what} into {store}")
    if report.known:
        say(f"skipped     {report.known} that are in the store already")
    for reason, count in sorted((+report.left_out).items()):
        say(f"left out    {count} {reason}")
    if report.bad:
        say(f"skipped     {report.bad} that cannot be read:")


@contextmanager
def _bytes_bar(files: list[Path]) -> Iterator[Callable[[int], None]]:
    from localtrace.cli.progress import progress_bar

    total = sum(file.stat().st_size for file in files)
    with progress_bar("importing", " bytes") as show:
        done = 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            show(done, total)

        yield on_bytes
