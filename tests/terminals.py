"""Runs commands on a terminal of a given width, as a person does."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shown:
    """The output of a command."""

    lines: list[str]
    """On the terminal."""
    stderr: str
    exit_code: int


def on_terminal(width: int, *arguments: object, coloured: bool = False) -> Shown:
    """Run a command whose standard output is a terminal of `width` columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm", **({} if coloured else {"NO_COLOR": "1"})}
    command = [sys.executable, "-m", "localtrace", *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment
    ) as process:
        os.close(theirs)
        written = b"".join(iter(lambda: _read(ours), b""))
        assert process.stderr is not None
        stderr = process.stderr.read().decode()
    os.close(ours)
    return Shown(written.decode().splitlines(), stderr, process.returncode)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # on Linux the end of a terminal is an error
        return b""
