"""`localtrace import`: record what other tools wrote, exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import click

from localtrace.cli.import_files import file_format

if TYPE_CHECKING:
    from localtrace.importers.imported_rollouts import Rollout
    from localtrace.importers.source import Source


@click.group()
def command() -> None:
    """Import rollouts and engine logs of other tools.

    Importing again adds only what is new, so an interrupted import is completed by repeating it.
    Lines that cannot be read are reported and skipped.
    """


_format = partial(file_format, command)


@_format("verl-jsonl", "verl_jsonl")
@click.option("--validate", is_flag=True, help="Mark them as validation rollouts.")
def verl_jsonl(source: Source, validate: bool) -> Iterator[Rollout]:
    """Import rollouts that verl dumped as JSONL.

    PATH is a folder of verl's setting trainer.rollout_data_dir or trainer.validation_data_dir, or a
    file STEP.jsonl in it. The dumps hold texts, scores and ground truth, but no token ids and no
    times; a rollout gets the time of its file. Without --run the run id is derived from the folder.
    Give the same --run to the training and the validation dumps of one job.
    """
    from localtrace.importers.verl_jsonl import read_rollouts

    return read_rollouts(source, validate=validate)


@_format("chat", "chat")
@click.option("--reward", metavar="FIELD", default="reward", show_default=True,
              help="Field of a line that is the reward.")  # fmt: skip
def chat(source: Source, reward: str) -> Iterator[Rollout]:
    """Import rollouts of any tool: lines of JSON with messages and a reward.

    PATH is a file of one rollout per line, or a folder of files .jsonl. A line has messages in
    OpenAI's form, calls of tools and reasoning included (or conversations, with from and value),
    and reward, a number. Each message of the assistant is a turn, unless its weight is 0; calls of
    tools that a message answers are calls. step, sample_index, rollout_n, group_id, validate, name,
    agent and data_source are the fields of these names, everything else becomes an attribute. A
    line with an id is imported once, wherever it stands; a rollout gets the time of its file.
    Without --run the run id is derived from the folder.
    """
    from localtrace.importers.chat import read_rollouts

    return read_rollouts(source, reward=reward)


@_format("trl-completions", "trl_completions")
@click.option(
    "--reward",
    "rewards",
    multiple=True,
    metavar="COLUMN",
    help="Column of a reward function that is part of the reward; may be repeated.  [default: the "
    "only one]",
)
def trl_completions(source: Source, rewards: tuple[str, ...]) -> Iterator[Rollout]:
    """Import rollouts that TRL logged with log_completions=True.

    PATH is the folder completions below the trainer's output_dir, or a file in it. The files hold
    texts or messages, the value of each reward function and the advantage, but no token ids and no
    times; a rollout gets the time of its file. TRL does not write the weights of its reward
    functions: the reward is the one function's value, or the sum of those that --reward names.
    Evaluation rollouts are not marked in the files.
    Without --run the run id is derived from the folder.
    """
    from localtrace.importers.trl_completions import read_rollouts

    return read_rollouts(source, rewards=rewards)


@_format("atif", "atif")
def atif(source: Source) -> Iterator[Rollout]:
    """Import ATIF documents, Harbor's format of agents' trajectories, of version 1.0 to 1.8.

    PATH is a file of one document, or of one per line, as localtrace export atif writes them; or a
    folder, such as a job of Harbor's, with files trajectory*.json anywhere below it. Token ids and
    logprobs are kept where a document holds them; a subagent's document is a trajectory of its own.
    Steps without a time get that of the step before, or of the file. In a job, rewards and errors
    come from each trial's result.json, and the trials of a task are a group.

    What localtrace exported comes back with its trace ids, calls, outcomes and times. Without --run
    the run is that of the first such document, else its id is derived from the folder.
    """
    from localtrace.importers.atif import read_rollouts

    return read_rollouts(source)


@_format("slime-dump", "slime_dump")
@click.option(
    "--reward-key", metavar="NAME",
    help="The number that counts where a reward has several, as in slime's option of this name.",
)  # fmt: skip
def slime_dump(source: Source, reward_key: str | None) -> Iterator[Rollout]:
    """Import rollouts that slime or miles dumped.

    PATH is the folder rollout_data of their option --dump-details, the folder of the files of
    --save-debug-rollout-data, or a file in it. Samples become what the hook for slime records of
    them, with ids, logprobs, masks and rewards. With --dump-details, advantages and logprobs of
    slime's trainer are read from the folder train_data beside; those of miles are not.

    The files are pickles. Only plain values and tensors are read, by torch, which must be
    installed; a file that holds anything else is refused. Each file is read into memory whole.
    Fields that have no place in a store are counted. Without --run the run id is derived from the
    folder.
    """
    from localtrace.importers.slime_dump import read_rollouts

    return read_rollouts(source, reward_key=reward_key)


@_format("inspect", "inspect_logs")
@click.option(
    "--reward",
    "rewards",
    multiple=True,
    metavar="SCORER",
    help="Scorer, or SCORER.NAME of a score with names, that is part of the reward; may be "
    "repeated.  [default: the only one]",
)
def inspect(source: Source, rewards: tuple[str, ...]) -> Iterator[Rollout]:
    """Import samples that Inspect AI logged.

    PATH is a log .eval or .json, or a folder with files .eval anywhere below it. An epoch of a
    sample becomes a rollout: calls of models are its turns, with messages and usage, calls of tools
    its tools, scores its attributes. The letters of a score count as in Inspect: C 1, P 0.5, I
    and N 0. The reward is the only score, or the sum of those that --reward names. Errors and
    limits are the rollouts' fates. Needs the extra inspect.

    Token ids are there only in logs that localtrace exported; these come back with their trace ids,
    calls, outcomes and times, and messages and tools in Inspect's form. Without --run the run is
    that of the first such log, else its id is derived from the folder.
    """
    from localtrace.importers.inspect_logs import read_rollouts

    return read_rollouts(source, rewards=rewards)


@_format("verifiers", "verifiers_traces")
def verifiers(source: Source) -> Iterator[Rollout]:
    """Import episodes that verifiers or prime-rl saved.

    PATH is a file traces.jsonl, or a folder with such files anywhere below it: that of a run of
    verifiers' eval, or the folder rollouts of prime-rl. Each agent's trace is a trajectory with its
    turns, tools, rewards and errors, and with token ids and logprobs where verifiers had them. Of
    prime-rl, what its effective sets hold is marked as trained, with advantages; import both sets
    at once. Traces keep their ids, so those that the hook recorded are skipped. Without --run the
    run id is verifiers- and that of the first episode, else derived from the folder.
    """
    from localtrace.importers.verifiers_traces import read_rollouts

    return read_rollouts(source)


@_format("sglang-metrics", "sglang_metrics")
def sglang_metrics(source: Source) -> Iterator[Rollout]:
    """Import generations that SGLang logged.

    PATH is the log folder of SGLang's option --export-metrics-to-file, or a file in it. Generated
    ids are present only if a request asked for return_logprob.

    A generation becomes the call that localtrace's hook would have recorded: below the calling span
    that its request id names, else a trajectory of its own. Without --run the run is sglang. With
    the --run of a training, the view engine_calls matches generations to its calls.
    """
    from localtrace.importers.sglang_metrics import read_rollouts

    return read_rollouts(source)


@_format("otlp", "otlp")
@click.option(
    "--reward",
    metavar="NAME",
    help="Attribute or evaluation that is the reward.  [default: the only evaluation]",
)
@click.option("--step", metavar="ATTRIBUTE", help="Attribute that holds the training step.")
@click.option("--sample-index", metavar="ATTRIBUTE", help="Attribute that names the sample.")
@click.option(
    "--rollout-n", metavar="ATTRIBUTE", help="Attribute that numbers the rollouts of a sample."
)
def otlp(source: Source, **names: str | None) -> Iterator[Rollout]:
    """Import traces of OpenTelemetry, such as the collector's file exporter writes.

    PATH is a file of requests as JSON or Protocol Buffers, or a folder of them. Each trace becomes
    a trajectory: spans of generations are turns, with the messages of OpenTelemetry's conventions
    for generative AI (the current ones and those before) or OpenInference's; spans of tools and all
    others are calls; evaluations are outcomes. Spans of a trace may stand in several files.

    Attributes that options name are looked for in the root span, its service, then in other spans.
    What localtrace exported needs no options: it comes back with its ids, places, token ids,
    logprobs, rewards and outcomes. Without --run the run id is derived from the folder.
    """
    from localtrace.importers.otlp import Names, read_rollouts

    return read_rollouts(source, Names(**names))
