"""Read receipts. Their files are hostile input."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from localtrace.errors import UploadError
from localtrace.store.receipts import UPLOAD_ID
from localtrace.uploader.receipt import RECEIPT_VERSION, Receipt

RECEIPT_MAX_BYTES = 2 * 2**30
"""Largest file that is read; receipts of millions of trajectories are smaller."""
T = TypeVar("T")


def read_receipt(path: Path) -> Receipt:
    """Read a receipt.

    Raises:
        UploadError: the file is not a receipt, is damaged, or is of another version.
    """
    data = contents(path)
    version = decoded(path, data, _Version).format_version
    if version != RECEIPT_VERSION:
        raise UploadError(
            f"{path} is a receipt of version {version}, this localtrace reads version "
            f"{RECEIPT_VERSION}: read it with the localtrace that wrote it"
        )
    receipt = decoded(path, data, Receipt)
    _check(path, receipt)
    return receipt


def contents(path: Path) -> bytes:
    """Return the bytes of a file that may be a receipt.

    Raises:
        UploadError: it is not a plain file, or too large for a receipt.
    """
    if not path.is_file():
        raise UploadError(f"{path} is not a file: name the JSON file of a receipt")
    if path.stat().st_size > RECEIPT_MAX_BYTES:
        raise UploadError(f"{path} is too large for a receipt: name the JSON file of one")
    return path.read_bytes()


def decoded(path: Path, data: bytes, kind: type[T]) -> T:
    """Decode the content of a receipt's file as a type with all or some of its fields.

    Raises:
        UploadError: it is not a receipt, or damaged.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UploadError(
            f"{path} is not a receipt, or damaged ({error}): copy it again from the machine that "
            "made the upload"
        ) from None


def ended_at(receipt: Receipt) -> datetime:
    """Return the end time of the upload, in UTC."""
    return datetime.fromisoformat(receipt.ended_at).astimezone(UTC)


def _check(path: Path, receipt: Receipt) -> None:
    wrong = None
    if not UPLOAD_ID.fullmatch(receipt.upload_id):
        wrong = f"no upload is called {receipt.upload_id[:80]!r}"
    elif len({trace.trace_id for trace in receipt.traces}) < len(receipt.traces):
        wrong = "a trajectory is in it twice"
    else:
        try:
            ended_at(receipt)
        except (ValueError, OverflowError):
            wrong = f"{receipt.ended_at[:80]!r} is not a time"
    if wrong:
        raise UploadError(f"{path} is not a receipt of localtrace ({wrong}): name another file")


class _Version(msgspec.Struct):
    format_version: Annotated[int, msgspec.Meta(ge=1)]
