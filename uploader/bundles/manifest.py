"""Checksums of a bag's files, and the ids made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from localtrace.store.bundle import INFO_FILE, SUMMARY_FILE, TAG_MANIFEST_FILE, Bag, Previous

NOT_IN_ID = (f"data/{INFO_FILE}", f"data/{SUMMARY_FILE}")
"""Payload files that tell the id, so it cannot depend on them."""


def sha256_of(path: Path) -> str:
    """Checksum of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_text(files: Mapping[str, str]) -> str:
    """Checksums by name as sha256sum writes and reads them."""
    return "".join(f"{files[name]}  {name}\n" for name in sorted(files))


def bundle_id_of(files: Mapping[str, str]) -> str:
    """The id of a bag whose payload has these checksums."""
    kept = {name: digest for name, digest in files.items() if name not in NOT_IN_ID}
    return hashlib.sha256(manifest_text(kept).encode()).hexdigest()


def previous_of(bag: Bag) -> Previous:
    """How the bag after this one names it."""
    return Previous(bag.info.bundle_id, sha256_of(bag.root / TAG_MANIFEST_FILE))
