"""What a process says of itself when it begins to record, secrets left out."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Mapping
from typing import Any

from localtrace import codec
from localtrace.errors import ConfigError
from localtrace.store.layout import StoreLayout
from localtrace.version import __version__

_PACKAGES = (
    "verl", "trl", "torch", "transformers", "sglang", "vllm", "ray", "numpy", "pyarrow",
)  # fmt: skip
_SECRET = re.compile(
    r"(api|access|auth|secret|private|session|bearer)[_-]?(key|token)|passw|secret|credential"
    # A name that ends in `token`, but for the special tokens of a tokenizer.
    r"|(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)(?<!stop_)token$",
    re.IGNORECASE,
)
_LEFT_OUT = "[secret left out]"


def describe_process(worker: str | None, config: Any, tokenizer: str | None) -> dict[str, Any]:
    """Facts for the run's start record, by column of the table `runs`."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "worker": worker,
        **ray_ids(),
        "command": command_line(sys.orig_argv),
        "config": without_secrets(codec.decode(codec.encode(config))),
        "versions": _versions(),
        "git_commit": _git_commit(),
        "tokenizer": tokenizer,
    }


def without_secrets(value: Any) -> Any:
    """Replace what stands under names that look like a key, token or password, but for numbers."""
    if isinstance(value, Mapping):
        return {
            name: _LEFT_OUT
            if isinstance(item, str | bytes | list | Mapping) and item and _is_secret(str(name))
            else without_secrets(item)
            for name, item in value.items()
        }
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def _is_secret(name: str) -> bool:
    return _SECRET.search(name) is not None


def command_line(arguments: list[str]) -> str:
    """The command, with the values of secret options left out."""
    shown = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = _is_secret(name)
        if hide_next:
            argument = _LEFT_OUT
        elif secret and equals:
            argument = f"{name}={_LEFT_OUT}"
        hide_next = secret and not equals and name.startswith("-")
        shown.append(argument)
    return " ".join(shown)


def _versions() -> dict[str, str]:
    import importlib.metadata  # 20 ms that only a process that records should pay
    import platform

    versions = {"python": platform.python_version(), "localtrace": __version__}
    for package in _PACKAGES:
        # What is imported may be something else than what is installed.
        loaded = sys.modules.get(package)
        said = getattr(loaded, "__version__", None)
        if said is not None:
            versions[package] = str(said)
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def ray_ids() -> dict[str, str | None]:
    """Ray's ids of the node, actor and job of this process, hex; none where Ray is not at work."""
    ray = sys.modules.get("ray")  # loading it takes long, and a process of Ray has it
    try:
        if ray is None or not ray.is_initialized():
            return {}
        context = ray.get_runtime_context()
        return {
            "node_id": context.get_node_id(),
            "actor_id": context.get_actor_id(),
            "job_id": context.get_job_id(),
        }
    except Exception:  # Ray is being loaded or shut down in another thread
        return {}


def _git_commit() -> str | None:
    import subprocess

    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def last_attempt(layout: StoreLayout, project: str, experiment: str) -> tuple[str, int]:
    """Run id and highest attempt of the newest run with these names.

    Raises:
        ConfigError: the store has no such run.
    """
    # Only a resumed run reads the store; starting to record must not load what reading needs.
    from localtrace.store.snapshot import take_snapshot

    columns = ["project", "experiment", "run_id", "attempt", "time_ns"]
    rows = [
        row
        for row in take_snapshot(layout).rows("runs", columns)
        if (row["project"], row["experiment"]) == (project, experiment)
    ]
    if not rows:
        raise ConfigError(
            f"LOCALTRACE_RESUME=must, but {layout.root} has no run of project {project!r} and "
            f"experiment {experiment!r}: name the run with LOCALTRACE_RUN_ID, or unset it"
        )
    newest = max(rows, key=lambda row: row["time_ns"])["run_id"]
    return newest, max(row["attempt"] for row in rows if row["run_id"] == newest)
