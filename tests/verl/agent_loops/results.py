"""The results of a job of verl, as plain values that a process without torch and verl can read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Batch:
    """One call of `generate_sequences`, in and out."""

    step: int
    validate: bool
    rows: list[dict[str, Any]]
    """Inputs: in V0 one per rollout, in V1 one per prompt."""
    tensors: dict[str, Any] = field(default_factory=dict)
    """V0: the tensors that came back."""
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """V0: the other columns that came back."""
    meta: dict[str, Any] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    """V1: the fields of every key in the queue."""
    tags: dict[str, dict[str, Any]] = field(default_factory=dict)
    """V1: the tags of every key in the queue."""


@dataclass
class Result:
    """Everything that a job gave."""

    runtime_env: dict[str, Any]
    v0: list[Batch] = field(default_factory=list)
    """Three steps, then a validation."""
    v1: list[Batch] = field(default_factory=list)
    failed: Batch | None = None
    """V1: agents that fail."""
    killed: Batch | None = None
    """V0: what went into the worker that was killed."""
    generations: list[Any] = field(default_factory=list)
    """Answers of the server before that."""
    generations_of_killed: list[Any] = field(default_factory=list)
    losses: list[dict[str, Any]] = field(default_factory=list)
    """Losses of every worker before that."""


def plain(value: Any) -> Any:
    """Tensors as arrays, and everything else as Python has it."""
    import numpy as np
    import torch

    if type(value).__name__ == "NonTensorData":
        value = value.data
    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray) and value.dtype == object:
        return plain(value.tolist())
    return value
