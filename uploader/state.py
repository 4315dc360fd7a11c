"""The uploader's own folder, which holds its ledger and its receipts."""

from __future__ import annotations

import os
from pathlib import Path

from localtrace.errors import ConfigError
from localtrace.record.config import read_environment
from localtrace.record.settings import UploaderSettings

REMEDY = (
    "free space there, or set LOCALTRACE_STATE_DIR to a folder that can be written; then repeat"
)
"""What to do where the folder cannot be written."""


def state_folder() -> Path:
    """Make and return the folder: LOCALTRACE_STATE_DIR, or `localtrace` in the user's state folder.

    Raises:
        ConfigError: the folder cannot be made.
    """
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    given = read_environment(UploaderSettings).state_dir
    folder = given or Path(f"{home}/localtrace").expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"cannot make the uploader's folder {folder}: {error.strerror}; "
            "set LOCALTRACE_STATE_DIR to a folder that can be written"
        ) from error
    return folder


def receipts_folder() -> Path:
    """Return the folder with the receipts of all uploads from this machine."""
    return state_folder() / "receipts"
