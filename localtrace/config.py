"""Settings of a recorder: arguments first, then LOCALTRACE_* variables, then defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from localtrace.errors import ConfigError
from localtrace.rules import parse_rules

MIB = 2**20
_FOREVER_S = 1e9
"""Longer times than threads can wait."""
_FOLDER_NAMES = ("project", "experiment", "run_id")
_FOLDER_NAME_MAX_BYTES = 200


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a recorder can be told. Each field is also LOCALTRACE_<FIELD IN CAPITALS>."""

    store: Path
    """Folder of the store."""
    project: str = "default"
    """Name of the project; a partition of the tables."""
    experiment: str = "default"
    """Name of the experiment; a partition of the tables."""
    run_id: str | None = None
    """One training job; made by the first process when not given."""
    attempt: int = 0
    """Restart counter of the run."""
    resume: str | None = None
    """`must`: go on with the newest run of this project and experiment, as its next attempt."""
    worker: str | None = None
    """A name for this process."""
    journal_dir: Path | None = None
    """Local folder for journals; inside the store when not given."""
    queue_max_bytes: int = 256 * MIB
    """Finished records that may wait for the disk."""
    flush_interval_s: float = 0.01
    """How often the writer thread drains the queue."""
    fsync_interval_s: float = 5.0
    """How often a journal is synced, against a crash of the machine."""
    rotate_max_bytes: int = 64 * MIB
    """A journal is closed, and can be sealed, at this size."""
    rotate_interval_s: float = 60.0
    """A journal is closed, and can be sealed, at this age."""
    min_free_bytes: int | None = None
    """Recording pauses below this much free space; default: the larger of 20 GB and 5%."""
    max_store_bytes: int | None = None
    """Recording pauses above this size of the store; default: no limit."""
    record_max_bytes: int = 64 * MIB
    """Inputs or outputs that encode to more are replaced by a placeholder."""
    pinned_max_bytes: int = 256 * MIB
    """Pinned memory for tensors on their way from a GPU, taken at the first one; their copies on
    the GPU take at most as much; 0: no tensor on a GPU is kept."""
    keep: tuple[str, ...] = ()
    """Names kept although they are dropped by default, such as routed_experts."""
    seal: bool = True
    """Start the sealer in the background."""
    sample: str | None = None
    """Which groups keep their spans, such as `errors,truncated,extremes=2,panel=17;42,share=0.1`;
    all do when not given."""


def load_settings(
    store: str | Path | None, given: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> Settings:
    """Merge arguments, environment and defaults.

    Raises:
        ConfigError: a name is unknown, or a value is not of its kind.
    """
    environ = os.environ if environ is None else environ
    known = {field.name for field in fields(Settings)}
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}: known are {', '.join(sorted(known))}")
    values: dict[str, Any] = {
        name: environ[variable]
        for name in known
        if environ.get(variable := f"LOCALTRACE_{name.upper()}")
    }
    if store is None and set(values.get("store", "")) & {"*", "?"}:
        raise ConfigError(
            f"LOCALTRACE_STORE={values['store']} is a pattern of stores to read: name one folder "
            "to record into"
        )
    values.update({name: value for name, value in given.items() if value not in (None, "")})
    if store is not None:
        values["store"] = store
    values.setdefault("store", "localtrace")
    return Settings(**{name: _convert(name, value) for name, value in values.items()})


def _convert(name: str, value: Any) -> Any:
    try:
        if name in ("store", "journal_dir"):
            return Path(value).expanduser().absolute()
        if name == "keep":
            return tuple(value.replace(",", " ").split() if isinstance(value, str) else value)
        if name == "seal":
            return value if isinstance(value, bool) else _switch(str(value))
        if name.endswith("_s"):
            return min(_positive(float(value)), _FOREVER_S)
        if name == "sample":
            parse_rules(str(value))
        if name == "resume" and value != "must":
            raise ValueError("use must, or leave it out")
        if name.endswith("_bytes"):
            return _positive(int(value))
        if name == "attempt":
            return _attempt(int(value))
        return _folder_name(str(value)) if name in _FOLDER_NAMES else str(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"setting {name} cannot be {value!r}: {error}") from error


def _switch(text: str) -> bool:
    states = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in states:
        raise ValueError("use 1 or 0")
    return states[text.lower()]


def _positive(number: Any) -> Any:
    if not number >= 0:  # also NaN
        raise ValueError("it must be 0 or more")
    return number


def _attempt(number: int) -> int:
    if number >= 2**31:
        raise ValueError("it must be below 2147483648")
    return int(_positive(number))


def _folder_name(text: str) -> str:
    if text in (".", ".."):
        raise ValueError("folders are named after it")
    size_bytes = len(quote(text, safe=""))  # fails for lone surrogates
    if size_bytes > _FOLDER_NAME_MAX_BYTES:
        raise ValueError(
            f"folders are named after it, and percent-encoded it has {size_bytes} bytes: "
            f"use at most {_FOLDER_NAME_MAX_BYTES}"
        )
    return text
