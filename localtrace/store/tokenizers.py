"""Tokenizers kept in the store, once by content, so that ids can be read without the model."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from localtrace.errors import ConfigError
from localtrace.store.layout import StoreLayout

FILE_NAME = "tokenizer.json"
_DIGEST = re.compile("[0-9a-f]{64}")
Decode = Callable[[str, list[int]], str | None]
"""Turns token ids of a run into text; None where the run has no usable tokenizer."""


def keep_tokenizer(layout: StoreLayout, source: Path, run_id: str) -> str:
    """Copy a tokenizer into the store as the run's own; returns its sha256, its folder's name.

    Raises:
        ConfigError: there is no tokenizer.json at `source`.
    """
    file = source / FILE_NAME if source.is_dir() else source
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"no tokenizer at {file} ({error.strerror}): name a tokenizer.json or its folder"
        ) from error
    return store_tokenizer(layout, data, run_id)


def store_tokenizer(layout: StoreLayout, data: bytes, run_id: str) -> str:
    """Keep the content of a tokenizer.json as the run's own; returns its sha256."""
    digest = hashlib.sha256(data).hexdigest()
    _put(layout.tokenizers / digest / FILE_NAME, data)
    _put(_pointer(layout, run_id), digest.encode())
    return digest


def has_tokenizer(layout: StoreLayout, run_id: str) -> bool:
    """Whether the store keeps a tokenizer of a run."""
    return _pointer(layout, run_id).exists()


def _pointer(layout: StoreLayout, run_id: str) -> Path:
    name = pointer_in_bundle(run_id) if layout.bags else quote(run_id, safe="")
    return layout.tokenizers / "runs" / name


def pointer_in_bundle(run_id: str) -> str:
    """Name of the file in a bundle's `tokenizers/runs` that names the tokenizer of a run.

    BagIt and sha256sum disagree about `%` in names, so none has it.
    """
    return quote(run_id, safe="").replace("%", "=")


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{uuid.uuid4().hex}")
    draft.write_bytes(data)
    os.replace(draft, path)


def tokenizer_file(layout: StoreLayout, run_id: str) -> Path | None:
    """The file of the run's tokenizer; None where the run kept none."""
    try:
        digest = _pointer(layout, run_id).read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return None
    # The maker of a bundle could name any folder.
    return layout.tokenizers / digest / FILE_NAME if _DIGEST.fullmatch(digest) else None


def tokenizer_of(layout: StoreLayout, run_id: str) -> Any | None:
    """The run's tokenizer, as a `tokenizers.Tokenizer`.

    None where the run kept none, the package `tokenizers` is not installed (extra `text`), or the
    file cannot be read.
    """
    try:
        from tokenizers import Tokenizer

        file = tokenizer_file(layout, run_id)
        return None if file is None else Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises bare Exception for a damaged file
        return None


def text_decoder(layout: StoreLayout) -> Decode:
    """A function from run id and token ids to text, special tokens included."""
    of_run = cache(lambda run_id: tokenizer_of(layout, run_id))

    def decode(run_id: str, ids: list[int]) -> str | None:
        tokenizer = of_run(run_id)
        if tokenizer is None:
            return None
        try:
            text: str = tokenizer.decode(ids, skip_special_tokens=False)
            return text
        except (OverflowError, TypeError, ValueError):
            return None  # ids that no vocabulary has

    return decode
