"""Checksums of a bag's files, and the ids derived from them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from localtrace.store.bundle import INFO_FILE, SUMMARY_FILE, TAG_MANIFEST_FILE, Bag, Previous
from localtrace.store.files import open_given

NOT_IN_ID = (f"data/{INFO_FILE}", f"data/{SUMMARY_FILE}")
"""Payload files that contain the bundle's id, and so cannot be hashed into it."""


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    with open_given(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_text(files: Mapping[str, str]) -> str:
    """Format checksums by file name as sha256sum writes and reads them."""
    return "".join(f"{files[name]}  {name}\n" for name in sorted(files))


def bundle_id_of(files: Mapping[str, str]) -> str:
    """Return the id of a bag whose payload files have these checksums."""
    kept = {name: digest for name, digest in files.items() if name not in NOT_IN_ID}
    return hashlib.sha256(manifest_text(kept).encode()).hexdigest()


def previous_of(bag: Bag) -> Previous:
    """Return the reference by which the next bag in the sequence names this one."""
    return Previous(bag.info.bundle_id, sha256_of(bag.root / TAG_MANIFEST_FILE))
