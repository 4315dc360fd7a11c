"""Programs of ours in processes of their own: JSON in, as an argument, and JSON out, on stdout."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    import subprocess

T = TypeVar("T")


def start(module: str, request: object, **options: Any) -> subprocess.Popen[bytes]:
    """Start a module as a program that does what is requested.

    Args:
        module: its name.
        request: what the program gets by `requested`.
        options: those of `subprocess.Popen`.
    """
    import subprocess  # slow to import, and most processes start none

    process: subprocess.Popen[bytes] = subprocess.Popen(
        [sys.executable, "-m", module, msgspec.json.encode(request).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        **options,
    )
    return process


def requested(kind: type[T]) -> T:
    """Return the request that this program was started with."""
    return msgspec.json.decode(sys.argv[1], type=kind)


def answer(result: object) -> None:
    """Answer whoever started this program."""
    sys.stdout.buffer.write(msgspec.json.encode(result))


def answered(process: subprocess.Popen[bytes], kind: type[T]) -> T | None:
    """Wait for the answer of a program; None where it crashed."""
    try:
        return msgspec.json.decode(process.communicate()[0], type=kind)
    except msgspec.DecodeError:
        return None
