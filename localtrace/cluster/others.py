"""Tokenizers and receipts of another store: what readers need besides the tables."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from localtrace.cluster.folder_store import Source
from localtrace.errors import StoreError
from localtrace.schema import UPLOADS
from localtrace.store.files import is_file, make_folder, put_file
from localtrace.store.layout import StoreLayout
from localtrace.store.receipts import UPLOAD_ID
from localtrace.store.tokenizers import FILE_MAX_BYTES, FILE_NAME

_RECEIPT_MAX_BYTES = 2**31
_DIGEST_CHARS = 64
_TOKENIZER = re.compile(r"tokenizers/([0-9a-f]{64})/tokenizer\.json")
_NAME_OF_RUN = re.compile(r"tokenizers/runs/[\w.~%-]{1,255}", re.ASCII)
_RECEIPT = re.compile(rf"receipts/{UPLOAD_ID.pattern}\.(json|parquet)")


def bring_others(source: Source, into: StoreLayout, folder: Path, problems: list[str]) -> None:
    """Bring the tokenizers and receipts that are not here.

    Args:
        source: the store that has them.
        into: this store.
        folder: where files wait until they are checked.
        problems: gets a message for each that is refused.
    """
    for name, size_bytes in sorted(source.others().items()):
        if is_file(into.root / name):
            continue
        try:
            _bring(source, into, folder, name, size_bytes)
        except FileNotFoundError:
            continue  # replaced meanwhile
        except StoreError as error:
            problems.append(f"{source.place}/{name}: not gathered: {error}")


def _bring(source: Source, into: StoreLayout, folder: Path, name: str, size_bytes: int) -> None:
    path, pieces = into.root / name, source.read(name, size_bytes)
    if match := _TOKENIZER.fullmatch(name):
        _limit(size_bytes, FILE_MAX_BYTES)
        make_folder(into.root, path.parent)
        put_file(path, _digested(pieces, match[1]))
    elif _NAME_OF_RUN.fullmatch(name):
        _limit(size_bytes, _DIGEST_CHARS)
        digest = b"".join(pieces)
        if is_file(into.tokenizers / digest.decode("ascii", "replace") / FILE_NAME):
            put_file(path, digest)
    elif _RECEIPT.fullmatch(name):
        _limit(size_bytes, _RECEIPT_MAX_BYTES)
        staged = folder / path.name
        put_file(staged, pieces)
        _check_receipt(staged)
        path.parent.mkdir(exist_ok=True)
        os.replace(staged, path)
    else:
        raise StoreError("no store has a file of this name")


def _limit(size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise StoreError(f"it has {size_bytes:,} bytes, and {max_bytes:,} are the limit")


def _digested(pieces: Iterator[bytes], wanted: str) -> Iterator[bytes]:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        yield piece
    if digest.hexdigest() != wanted:
        raise StoreError("its content is not that which its folder names")


def _check_receipt(path: Path) -> None:
    import pyarrow.parquet as pq

    if path.suffix != ".parquet":
        return
    known = {column.name: column.type for column in UPLOADS.arrow()}
    try:
        columns = {column.name: column.type for column in pq.read_schema(path)}
    except (pa.ArrowException, OSError) as error:
        columns, reason = {}, str(error).splitlines()[0]
    else:
        reason = "it has other columns"
    if not columns or not columns.items() <= known.items():
        path.unlink()
        raise StoreError(f"it is no table of a receipt ({reason})")
