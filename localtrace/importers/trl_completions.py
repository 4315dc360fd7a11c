"""Completions that TRL's trainers log: `log_completions=True` of GRPO and its kin.

TRL writes a file `completions_STEP.parquet` at every logging step, with one row per rollout:

    step         global step                        -> step
    prompt       text or messages                   -> prompt or messages of the first turn
    completion   text or messages                   -> turns: one per message of the assistant
    advantage                                       -> attribute advantage
    one column per reward function, and per column that a reward function logs besides
                                                    -> attributes of the same names

The reward is the one such column, or the sum of those that `--reward` names: TRL weighs its reward
functions, and writes neither the weights nor the sum. The files hold no token ids, no times, and
no sample indexes; rollouts of a group share their prompt. A message is a row of one Arrow type, so
a field that one message lacks is null there; such fields are left out.

A file holds the newest rollouts, as many as a generation batch has, whether or not they were in the
file before: TRL logs a batch again at every step that reuses it. Rows that a file repeats from the
end of the one before are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from localtrace.errors import ConfigError
from localtrace.importers.imported_rollouts import (
    CallIn,
    Rollout,
    derived_span_id,
    digest_id,
    folder_run_id,
)
from localtrace.importers.lines import BadLine
from localtrace.importers.source import Source

PATTERN = "completions_*.parquet"
OP = "trl.completion"
_FIXED = ("step", "prompt", "completion", "advantage")
_ROWS = 256
_NO_REWARD = "rewards: several columns may be it, so name those that add up to it by --reward"
_REPEATED = "rows that TRL had written to the file before"
default_run_id = partial(folder_run_id, "trl")


def read_rollouts(source: Source, *, rewards: Collection[str]) -> Iterator[Rollout]:
    """Yield the trajectory of each row; rows that are no rollout are counted in the report.

    A trace id is derived from the run, the name of the file, the number of the row and its content.

    Args:
        source: files in the order of their steps.
        rewards: columns whose sum is the reward; without any, the only column that may be it.

    Raises:
        ConfigError: a file lacks a column of `rewards`.
    """
    before: list[bytes] = []
    for path in source.whole_files():
        try:
            with pq.ParquetFile(path) as file:
                held = [_digest(row) for row in _rows(file)]
                repeated = _overlap(before, held)
                if repeated:
                    source.report.left_out[_REPEATED] += repeated
                yield from _of_file(file, path, source, rewards, repeated)
                before = held
        except (pa.ArrowException, OSError) as error:
            source.report.refuse(str(path), f"not a Parquet file of TRL ({error})")


def _rows(file: pq.ParquetFile) -> Iterator[dict[str, Any]]:
    for batch in file.iter_batches(_ROWS):
        yield from batch.to_pylist()


def _digest(row: dict[str, Any]) -> bytes:
    """Return a digest of a row without its step."""
    return digest_id(16, repr([(name, row[name]) for name in sorted(row) if name != "step"]))


def _overlap(before: list[bytes], held: list[bytes]) -> int:
    """Return how many rows at the end of one file stand at the beginning of the next."""
    counts = (len(before) - at for at, row in enumerate(before) if held and row == held[0])
    return next((count for count in counts if before[-count:] == held[:count]), 0)


def _of_file(
    file: pq.ParquetFile, path: Path, source: Source, rewards: Collection[str], first: int
) -> Iterator[Rollout]:
    schema = file.schema_arrow
    names = [name for name in schema.names if name not in _FIXED]
    if missing := [name for name in rewards if name not in names]:
        raise ConfigError(
            f"{path} has no column {missing[0]}: name others by --reward, of {', '.join(names)}"
        )
    numbers = [name for name in names if _is_number(schema.field(name).type)]
    summed = rewards or (numbers if len(numbers) == 1 else ())
    modified_ns = path.stat().st_mtime_ns
    for number, row in enumerate(_rows(file)):
        if number < first:
            continue
        try:
            yield _rollout(row, (source.run_id, path.name, str(number)), summed, modified_ns)
        except BadLine as error:
            source.report.refuse(f"{path}: row {number + 1}", str(error))
            continue
        if numbers and not summed:
            source.report.left_out[_NO_REWARD] += 1


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _rollout(
    row: dict[str, Any], place: tuple[str, ...], rewards: Collection[str], start_ns: int
) -> Rollout:
    content = repr(row)
    step, prompt, completion = (row.pop(name, None) for name in _FIXED[:3])
    turns = _turns(prompt, completion)
    # TRL writes nan where a reward function gave None.
    values = {name: value for name, value in row.items() if value is not None and value == value}
    if parts := [values[name] for name in rewards if name in values]:
        values["reward"] = sum(parts)  # a missing one adds nothing, as in TRL
    calls = tuple(
        CallIn(
            span_id=derived_span_id("span", *place, content, str(seq)),
            op=OP,
            start_ns=start_ns,
            duration_ns=0,
            inputs=inputs,
            outputs=outputs,
            seq=seq,
        )
        for seq, (inputs, outputs) in enumerate(turns)
    )
    return Rollout(
        trace_id=digest_id(16, "trace", *place, content).hex(),
        calls=calls,
        start_ns=start_ns,
        step=step if type(step) is int else None,
        values=values,
        size_bytes=len(content),
    )


def _turns(prompt: Any, completion: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the arguments and the result of each turn: one per message of the assistant.

    Raises:
        BadLine: prompt or completion is neither text nor messages.
    """
    if isinstance(prompt, str) and isinstance(completion, str):
        yield {"prompt": prompt}, {"text": completion}
        return
    messages = _messages(prompt)
    for message in _messages(completion):
        if message.get("role") == "assistant":
            yield {"messages": list(messages)}, {"message": message}
        messages.append(message)


def _messages(found: Any) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise BadLine("prompt or completion is neither text nor messages: no row of TRL's")
    plain: list[dict[str, Any]] = _without_null(found)
    return plain


def _without_null(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_null(one) for one in value]
    if isinstance(value, dict):
        return {name: _without_null(one) for name, one in value.items() if one is not None}
    return value
