"""`localtrace export`: write chosen trajectories as files that other tools read."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from localtrace.cli.export_metrics import tensorboard, wandb
from localtrace.cli.options import store_option
from localtrace.cli.selection import REDACT_HELP, SELECTION_HELP, selection_options
from localtrace.errors import MissingDependency, QueryError
from localtrace.printing import say

if TYPE_CHECKING:
    from localtrace.exporters.source import Source
    from localtrace.uploader.selection import Selection

_REASONS_SHOWN = 10
_VALIDATION = "validation rollouts: add --validate to include them"


@click.group()
def command() -> None:
    """Write a selection as rows, a page, a timeline, or metrics.

    Trajectories are chosen and redacted as for upload: common shapes of keys are always taken out,
    --redact names further rules.
    """


command.add_command(tensorboard)
command.add_command(wandb)


def _export(
    form: Callable[..., Any], *, trains: bool = False, is_folder: bool = False
) -> click.Command:
    """Make a command of a format's function, which gets the source, the open file and its options.

    Args:
        is_folder: whether the function gets a new folder instead of a file.
        trains: whether models are trained on the format; validation rollouts are then left out
            by default.
    """

    @selection_options
    @_out_option(is_folder=is_folder)
    @click.option("--redact", type=click.Path(path_type=Path), metavar="RULES", help=REDACT_HELP)
    @store_option
    @click.pass_context
    def run(
        context: click.Context,
        /,
        selection: Selection,
        out: Path,
        redact: Path | None,
        store_paths: tuple[Path, ...],
        force: bool = False,
        **options: Any,
    ) -> None:
        chosen = selection
        if trains and not options.pop("validate"):
            chosen = _without_validation(selection)
        place: AbstractContextManager[Any]
        place = _new_folder(out) if is_folder else _new_file(out, force=force)
        with _open_source(store_paths, chosen, redact) as source, place as opened:
            left_out = form(source, opened, **options) or Counter()
            if chosen is not selection:
                left_out[_VALIDATION] = _count_validation(source, selection)
        _print(source, out, left_out)
        if source.failures:
            context.exit(1)

    made = command.command(form.__name__, help=form.__doc__, epilog=SELECTION_HELP)(run)
    made.params += getattr(form, "__click_params__", [])
    if trains:
        about = "Include validation rollouts, which are else left out unless a filter names them."
        made.params.append(click.Option(["--validate"], is_flag=True, help=about))
    return made


def _out_option(*, is_folder: bool) -> Callable[[Any], Any]:
    path = click.Path(path_type=Path)
    if is_folder:
        about = "Folder to write, which must not exist yet."
        return click.option("-o", "--out", type=path, required=True, help=about)

    def both(command: Any) -> Any:
        click.option("--force", is_flag=True, help="Replace an existing file.")(command)
        about = "File to write; - for standard output."
        return click.option("-o", "--out", type=path, required=True, help=about)(command)

    return both


def _new_file(out: Path, *, force: bool) -> AbstractContextManager[BinaryIO]:
    from localtrace.exporters.files import new_file, refuse_existing

    refuse_existing(out, force=force)
    return new_file(out, force=force)


def _new_folder(out: Path) -> AbstractContextManager[Path]:
    from localtrace.exporters.files import STDOUT, new_folder, refuse_existing_folder

    if out == STDOUT:
        raise click.UsageError("this format is a folder: name one with --out")
    refuse_existing_folder(out)
    return new_folder(out)


def _without_validation(selection: Selection) -> Selection:
    from localtrace.read.filters import Filters

    if any(term.key == "validate" for term in selection.filters.terms):
        return selection
    return replace(selection, filters=selection.filters & Filters(validate=False))


def _count_validation(source: Source, selection: Selection) -> int:
    """Return how many validation rollouts the selection would include."""
    from localtrace.read.filters import Filters
    from localtrace.uploader.selection import choose

    validation = selection.filters & Filters(validate=True)
    met = replace(selection, filters=validation, best=0, worst=0, groups=False, limit=None)
    return len(choose(source.store, met).trace_ids)


@contextmanager
def _open_source(
    store_paths: tuple[Path, ...], selection: Selection, redact: Path | None
) -> Iterator[Source]:
    from localtrace.cli.no_match import why_nothing
    from localtrace.cli.progress import progress_bar
    from localtrace.exporters.source import Source
    from localtrace.read.store import open_store

    with open_store(*store_paths) as store, progress_bar("exporting", " trajectories") as progress:
        source = Source(store, selection, redact=redact, on_progress=progress)
        if not source.choice.trace_ids:
            raise QueryError(f"nothing to export: {why_nothing(store, selection.filters)}")
        yield source


@_export
def jsonl(source: Source, file: BinaryIO) -> None:
    """Write one JSON object per trajectory.

    It holds the trajectory's fields, calls, whole prompts and outcomes. NaN is a text in rewards,
    outcomes and logprobs; other values that JSON cannot express become objects with $type.
    """
    from localtrace.exporters.jsonl import line

    source.each_line(file, line)


@_export
@click.option(
    "--rows", type=click.Choice(["trajectories", "turns", "spans", "outcomes"]), default="turns",
    show_default=True, help="What a row is.",
)  # fmt: skip
def parquet(source: Source, file: BinaryIO, rows: str) -> None:
    """Write a Parquet file of whole rows.

    Every row stands alone: it has its whole prompt and the fields of its trajectory.
    """
    from localtrace.exporters.parquet import Rows

    if file is sys.stdout.buffer or file.isatty():
        raise click.UsageError("Parquet is binary: name a file with --out")
    written = Rows(file, rows)
    source.each(source.choice.trace_ids, written.add)
    written.close()


@partial(_export, trains=True)
@click.option(
    "--rows", type=click.Choice(["completions", "messages", "tokens"]), default="completions",
    show_default=True, help="What a row is: an answer, a conversation, or a sequence of tokens.",
)  # fmt: skip
@click.option("--dedupe", is_flag=True, help="Write equal rows once.")
@click.option("--meta", is_flag=True, help="Add trace_id, reward, step and labels to each row.")
def sft(source: Source, file: BinaryIO, rows: str, dedupe: bool, meta: bool) -> Counter[str]:
    """Write rows for supervised fine-tuning.

    Only what the model generated in the rollout is trained on: no messages or answers of others, no
    tokens that a mask rules out, recorded or late, and no answer whose prompt was generated again.

    \b
    completions  prompt and completion, as messages or text: a row per answer
    messages     a row per conversation; what counts has the weight 1, all
                 other messages of the assistant 0, as OpenAI's format has it
    tokens       input_ids, and labels that are -100 where a token does not
                 count: a row for each sequence of turns, exact to the token

    TRL's SFTTrainer obeys completions and tokens as they are, and knows no weights. Left out are
    rewards that are not finite, and validation unless --validate is given. --best 1 keeps the best.
    """
    from localtrace.exporters.sft import Rows

    written = Rows(rows, is_deduped=dedupe, has_meta=meta)
    source.each_line(file, written.lines)
    return written.left_out


@_export
def chrome(source: Source, file: BinaryIO) -> None:
    """Write a timeline for Perfetto or chrome://tracing.

    Each process has a row for each trajectory that ran at the same time, and slices for its calls.
    """
    from localtrace.exporters.chrome import Timeline, in_start_order

    workers = in_start_order(source.store, source.choice.trace_ids, source.redaction.text)
    timeline = Timeline(workers)
    file.write(timeline.begin())
    source.each(workers, lambda one: file.write(timeline.events(one)))
    file.write(timeline.end())


@_export
@click.option("--service", help="Name of the service.  [default: the run's project]")
def otlp(source: Source, file: BinaryIO, service: str | None) -> None:
    """Write OpenTelemetry JSON, one request per line.

    The spans are those that upload --to otlp sends. A very long trajectory takes several lines.
    """
    from localtrace.exporters.otlp import lines_of

    source.failures |= source.choice.pruned
    for part in source.runs:
        lines = lines_of(part.run, service)
        source.each_line(file, lines, part.whole_ids)


@_export
def atif(source: Source, file: BinaryIO) -> Counter[str]:
    """Write ATIF documents, Harbor's format of agents' trajectories, one per line.

    Of one trajectory the file is a single document, as Harbor's own tools read it. Messages, calls
    of tools and their answers are steps, with token ids and logprobs; reward, group, advantage,
    fate and the rest stand under extra.
    """
    from localtrace.exporters.atif import Documents

    documents = Documents()
    source.each_line(file, documents.line)
    return documents.left_out


@partial(_export, is_folder=True)
def hub(source: Source, folder: Path) -> Counter[str]:
    """Write a dataset folder for the Hugging Face Hub.

    The Hub draws its sessions (STS, the Session Trace Simple Format) as conversations with
    reasoning and calls of tools. Rewards and the like are header fields there, which the Hub
    ignores, apart from the name: it tells step and reward. Parquet files beside the sessions hold
    everything, token ids and logprobs too; datasets.load_dataset opens both.

    Send the folder by  hf upload USER/NAME FOLDER --repo-type dataset
    """
    from localtrace.exporters.atif import Documents
    from localtrace.exporters.hub import Folder

    written = Folder(folder, Documents())
    source.each(source.choice.trace_ids, written.add)
    written.close()
    return written.left_out


@partial(_export, is_folder=True)
def inspect(source: Source, folder: Path) -> Counter[str]:
    """Write logs of Inspect AI, which inspect view --log-dir FOLDER shows.

    Each step of a run is a log, so that the list of logs shows how the mean reward changes. A
    sample is a prompt, its epochs are the rollouts. Messages, calls of models and tools, token ids
    and logprobs are in it; the reward and its parts are scores; step, advantage, fate and labels
    stand under metadata. Needs the extra inspect.
    """
    try:
        from localtrace.exporters.inspect_logs import write
    except ImportError:
        raise MissingDependency.for_extra("inspect-ai", "inspect") from None
    return write(source, folder)


@_export
def verifiers(source: Source, file: BinaryIO) -> Counter[str]:
    """Write episodes as verifiers saves them, one per line.

    verifiers and prime-rl read the file where it is named traces.jsonl. An episode holds the trace
    of one trajectory: a graph of messages with token ids, masks, logprobs and advantages, requests
    to the model, rewards with their parts, errors and task. What verifiers has no field for stands
    under info.localtrace.
    """
    from localtrace.exporters.verifiers_traces import Episodes

    episodes = Episodes()
    source.each_line(file, episodes.line)
    return episodes.left_out


@_export
def html(source: Source, file: BinaryIO) -> None:
    """Write one page that any browser opens, without a server or a network.

    It shows one trajectory; trajectories of one group, the best first; or two to eight of any
    groups, compared with the first. The page holds all that it needs and asks for nothing. What is
    too long for a page is left out, and the page says so: conversations of more than 4 million
    characters, and more than 50,000 tokens.
    """
    try:
        from localtrace.viewer.one_file import write
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"a page needs the package {error.name}: run  pip install 'localtrace[viewer]'"
        ) from None
    if file.isatty():
        raise click.UsageError("a page is for a browser: name a file with --out")
    write(source, file)


def _print(source: Source, out: Path, left_out: Counter[str]) -> None:
    # On stderr: stdout may hold the result itself.
    tell = partial(say, err=True)
    tell(f"{source.done} of {source.done + len(source.failures)} trajectories written to {out}")
    if pruned := len(source.choice.pruned.keys() - source.failures.keys()):
        tell(f"pruned      {pruned} of them: their calls were deleted, only their rows are left")
    for name, count in sorted(source.redaction.counts.items()):
        tell(f"redacted    {count} x {name}")
    for kind, count in sorted(source.redaction.unsearched.items()):
        tell(f"not searched for keys: {count} x {kind}")
    for reason, count in sorted(left_out.items()):
        if count:
            tell(f"left out    {count} {reason}")
    for trace_id, reason in list(source.failures.items())[:_REASONS_SHOWN]:
        tell(f"failed {trace_id}: {reason}")
    if len(source.failures) > _REASONS_SHOWN:
        tell(f"and {len(source.failures) - _REASONS_SHOWN} more")
