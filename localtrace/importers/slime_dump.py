"""Dumps of slime and miles: `--dump-details` and `--save-debug-rollout-data`.

After each rollout they write its samples to `ROLLOUT.pt`, and those of an evaluation to
`eval_ROLLOUT.pt`. A sample becomes what the hook of slime records of it: the same code describes
both. slime's trainer writes the tensors of the samples that it trained on to a folder `train_data`
beside, which become outcomes.

A dump does not name the dataset of an evaluation, the sampling parameters, or the reward's key, and
only slime's own trace of a sample has times; else they are those of the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from localtrace.importers import torch_files
from localtrace.importers.imported_rollouts import (
    CallIn,
    OutcomeIn,
    Rollout,
    derived_span_id,
    digest_id,
    folder_run_id,
)
from localtrace.importers.intake import Report
from localtrace.importers.lines import BadLine
from localtrace.importers.source import Source
from localtrace.importers.times import TIME_MAX_NS
from localtrace.record.capture import verdict
from localtrace.store.journal.records import STATUSES
from localtrace.trainer_hooks.slime.batches import SOURCE, place_of, sample_outcomes
from localtrace.trainer_hooks.slime.samples import OP, Batch, Described, Interval, describe
from localtrace.trainer_hooks.slime.training import SOURCE as TRAINER
from localtrace.trainer_hooks.slime.training import token_values
from localtrace.trainer_hooks.token_means import in_memory, means

PATTERN = "*.pt"
_EVALUATION = "eval_"
_ROLLOUTS, _TRAINED = "rollout_data", "train_data"
_TEXTS = ("response", "generate_function_path", "source")
_LISTS = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions")
_READ = {
    *_TEXTS, *_LISTS, "prompt", "response_length", "label", "reward", "index", "group_index",
    "rollout_id", "remove_sample", "status", "metadata", "train_metadata", "non_generation_time",
    "prefix_cache_info", "trace",
}  # fmt: skip
_PER_TOKEN = ("teacher_log_probs", "opd_reverse_kl")
_STATUSES = ("pending", "completed", "truncated", "aborted", "failed")
_SEVERAL = "rewards: they hold several numbers, so name the one that counts by --reward-key"
default_run_id = partial(folder_run_id, "slime")


def read_rollouts(source: Source, *, reward_key: str | None) -> Iterator[Rollout]:
    """Yield the trajectory of each sample; files and samples that cannot be read are counted.

    A trace id is derived from the run, the name of the file, the place in it and the content.

    Args:
        source: files in the order of their rollouts.
        reward_key: name of the number that counts, where a reward has several.

    Raises:
        ConfigError: torch is not installed.
    """
    for path in source.whole_files():
        try:
            yield from _of_file(path, source.run_id, reward_key, source.report)
        except BadLine as error:
            source.report.refuse(str(path), str(error))


def _of_file(path: Path, run_id: str, reward_key: str | None, report: Report) -> Iterator[Rollout]:
    dump = torch_files.load(path)
    samples = dump.get("samples") if isinstance(dump, dict) else None
    rollout_id = dump.get("rollout_id") if isinstance(dump, dict) else None
    if not isinstance(samples, list) or type(rollout_id) is not int or abs(rollout_id) >= 2**63:
        raise BadLine("not a dump of rollouts: it has no rollout_id or no samples")
    is_evaluation = path.stem.startswith(_EVALUATION)
    trained = {} if is_evaluation else _trained(path, samples, report)
    status = path.stat()
    batch = Batch(Interval(status.st_mtime_ns, status.st_mtime_ns), "file", reward_key, {})
    trainer = "miles" if "metadata" in dump else "slime"
    members: Counter[Any] = Counter()
    for position, raw in enumerate(samples):
        try:
            # A sample cannot have more values than its file has bytes.
            fields = _fields(raw, status.st_size)
            sample = _sample(fields)
            described = describe(sample, batch)
            place = _place(rollout_id, sample, members) | {"name": trainer}
            if is_evaluation:
                place |= {"validate": True, "group_id": _in_evaluation(place["group_id"])}
            outcomes = {} if is_evaluation else sample_outcomes(sample)
            outcomes |= {name: fields[name] for name in _PER_TOKEN if _is_numbers(fields.get(name))}
            identity = (run_id, path.stem, str(position), repr([fields.get(n) for n in _LISTS]))
            rollout = _rollout(described, identity, (outcomes, trained.get(position, {})), place)
        except (BadLine, TypeError, ValueError, KeyError, OverflowError) as error:
            report.refuse(f"{path}: sample {position + 1}", str(error) or type(error).__name__)
            continue
        if isinstance(sample.reward, dict) and described.values.get("reward") is None:
            report.left_out[_SEVERAL] += 1
        _count_left_out(fields, report)
        yield rollout


def _place(rollout_id: int, sample: Any, members: Counter[Any]) -> dict[str, Any]:
    """Return fields of the trajectory, by name; what is neither text nor a number is none."""
    found = place_of(rollout_id, sample, members)._asdict()
    for name in ("sample_index", "agent", "data_source", "group_id"):
        found[name] = str(found[name]) if isinstance(found[name], str | int) else None
    return found


def _in_evaluation(group_id: str | None) -> str | None:
    return None if group_id is None else f"eval-{group_id}"


def _rollout(
    described: Described,
    identity: tuple[str, ...],
    outcomes: tuple[dict[str, Any], dict[str, Any]],
    place: dict[str, Any],
) -> Rollout:
    """Return the trajectory of a sample.

    Args:
        identity: what its ids are derived from.
        outcomes: what the rollout gave it, and what the trainer did.
        place: fields of the trajectory, by name.
    """
    start_ns, end_ns = described.interval
    calls = tuple(
        CallIn(
            span_id=derived_span_id("span", *identity, str(seq)),
            op=OP,
            start_ns=one.interval.start_ns,
            duration_ns=one.interval.end_ns - one.interval.start_ns,
            inputs=one.inputs,
            outputs=one.outputs,
            seq=seq,
        )
        for seq, one in enumerate(described.generations)
    )
    times = [described.interval, *(one.interval for one in described.generations)]
    if not all(0 <= first <= last < TIME_MAX_NS for first, last in times):
        raise BadLine("its times are none")
    status, error = verdict(described.error)
    return Rollout(
        trace_id=digest_id(16, "trace", *identity).hex(),
        calls=calls,
        start_ns=start_ns,
        duration_ns=end_ns - start_ns,
        status=STATUSES[status],
        error=error,
        values=described.values,
        outcomes=tuple(
            OutcomeIn(name=name, value=value, time_ns=end_ns, source=source, step=place["step"])
            for source, values in zip((SOURCE, TRAINER), outcomes, strict=True)
            for name, value in values.items()
        ),
        size_bytes=sum(map(len, identity)),
        **place,
    )


# -- one sample ----------------------------------------------------------------------------


def _fields(raw: Any, budget: int) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise BadLine("not a sample: no mapping of fields")
    # Media and routing are left out, and may be large.
    read = {name: value for name, value in raw.items() if name in _READ or name in _PER_TOKEN}
    found: dict[str, Any] = torch_files.plain(read, budget)
    return found | {name: value for name, value in raw.items() if name not in read}


def _sample(fields: Mapping[str, Any]) -> Any:
    """Return an object with the fields of slime's `Sample`.

    Raises:
        BadLine: a field has a value that slime never gives it.
    """
    given = {name: fields.get(name) for name in _READ}
    for name in _LISTS:
        if given[name] is not None and not isinstance(given[name], list):
            raise BadLine(f"{name} is no list")
    for name in ("loss_mask", "rollout_log_probs"):
        if given[name] is not None and not _is_numbers(given[name]):
            raise BadLine(f"{name} holds what is no number")
    for name in _TEXTS:
        given[name] = None if given[name] is None else str(given[name])
    for name in ("metadata", "train_metadata"):
        if not isinstance(given[name], dict):
            given[name] = {}
    tokens, length = given["tokens"] or [], given["response_length"]
    if not all(type(one) is int and abs(one) < 2**63 for one in tokens):
        raise BadLine("tokens holds what is no id")
    if type(length) is not int or not 0 <= length <= len(tokens):
        raise BadLine("response_length fits no response of its tokens")
    if given["status"] not in _STATUSES:
        raise BadLine("its status is none of slime's")
    if not isinstance(given["prompt"], str | list):
        raise BadLine("its prompt is neither text nor messages")
    if not isinstance(given["reward"], int | float | dict | None):
        raise BadLine("its reward is no number")
    cached = given["prefix_cache_info"]
    given |= {
        "tokens": tokens,
        "response": given["response"] or "",
        "status": SimpleNamespace(value=given["status"]),
        "weight_versions": given["weight_versions"] or [],
        "remove_sample": bool(given["remove_sample"]),
        "prefix_cache_info": SimpleNamespace(
            cached_tokens=cached.get("cached_tokens", 0) if isinstance(cached, dict) else 0
        ),
        "trace": given["trace"] if isinstance(given["trace"], dict) else None,
    }
    return SimpleNamespace(**given)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int | float) for one in value)


def _count_left_out(fields: Mapping[str, Any], report: Report) -> None:
    for name, value in fields.items():
        is_empty = value is None or (isinstance(value, str | list | dict | bool) and not value)
        is_counts = isinstance(value, dict) and not any(value.values())
        if name not in _READ and name not in _PER_TOKEN and not is_empty and not is_counts:
            report.left_out[f"values of the field {str(name)[:80]}"] += 1


# -- what the trainer wrote beside ---------------------------------------------------------


def _trained(path: Path, rollouts: list[Any], report: Report) -> dict[int, dict[str, Any]]:
    """Return the outcomes of the samples that slime trained on, by their place in the dump."""
    if path.parent.name != _ROLLOUTS:
        return {}
    folder = path.parent.parent / _TRAINED
    if per_rank := len(list(folder.glob(f"{path.stem}_*.pt"))):
        report.left_out["files of the trainer that hold parts of a rank, as miles writes them"] += (
            per_rank
        )
    beside = folder / path.name
    if not beside.is_file():
        return {}
    try:
        dump = torch_files.load(beside)
        return _outcomes_of_training(dump, rollouts)
    except BadLine as error:
        report.refuse(str(beside), str(error))
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        report.refuse(str(beside), f"not a dump of slime's trainer ({type(error).__name__})")
    return {}


def _outcomes_of_training(dump: Any, rollouts: list[Any]) -> dict[int, dict[str, Any]]:
    samples, step = dump["samples"], dump["rollout_id"]
    positions = [one["rollout_position"] for one in samples]
    for one in samples:
        place = one["rollout_position"]
        if place < 0 or list(rollouts[place]["tokens"]) != one["tokens"].tolist():
            raise BadLine("its samples have other tokens than those of the rollout")
    if not samples:
        return {}
    names = set.intersection(*(set(one) for one in samples))
    columns = {name: [one[name] for one in samples] for name in names}
    columns["response_lengths"] = [int(one) for one in columns["response_lengths"]]
    masks = in_memory(columns["loss_masks"])
    values = token_values(columns)
    rows = [row for row, mask in enumerate(masks) if mask.any()]
    averages = means(values, masks, rows) if rows else {}
    values.pop("rollout_log_probs", None)  # the turns have them
    found: dict[int, dict[str, Any]] = {
        position: {name: tensors[row].tolist() for name, tensors in values.items()}
        for row, position in enumerate(positions)
    }
    for number, row in enumerate(rows):
        found[positions[row]] |= {name: each[number] for name, each in averages.items()}
        found[positions[row]] |= {"fate": "trained", "trained_step": step}
    return found
