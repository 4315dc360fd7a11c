"""Settings of the verl hook, from LOCALTRACE_* variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from localtrace.errors import ConfigError

_ON = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True)
class HookSettings:
    """What the verl hook can be told. Each field is LOCALTRACE_<FIELD IN CAPITALS>."""

    required: bool = False
    """1: stop the job at start-up when it cannot be recorded, instead of going on without."""
    trainer_outcomes: bool = True
    """0: leave verl's batches without trace ids; advantages and fates are then not recorded."""
    trainer_tokens: float = 0.02
    """Share of groups whose per-token values (logprobs, advantages) are recorded, 0 to 1."""


def hook_settings(environ: Mapping[str, str] | None = None) -> HookSettings:
    """Read the settings.

    Raises:
        ConfigError: a value is not of its kind.
    """
    environ = os.environ if environ is None else environ
    return HookSettings(
        _switch(environ, "LOCALTRACE_REQUIRED", False),
        _switch(environ, "LOCALTRACE_TRAINER_OUTCOMES", True),
        _share(environ, "LOCALTRACE_TRAINER_TOKENS", 0.02),
    )


def _switch(environ: Mapping[str, str], name: str, default: bool) -> bool:
    text = environ.get(name)
    if not text:
        return default
    if text.lower() not in _ON:
        raise ConfigError(f"{name} cannot be {text!r}: use 1 or 0")
    return _ON[text.lower()]


def _share(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    try:
        share = float(text) if text else default
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{name} cannot be {text!r}: use a share between 0 and 1")
    return share
