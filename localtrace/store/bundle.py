"""Bundles as readable stores: recognise one, and list its files without trusting it.

A bundle is a BagIt 1.0 bag (RFC 8493), or a folder of such bags, its parts. It may be hostile, so
names are checked before anything is opened, links are refused, and sizes and counts are limited.
Checksums are not verified here; `localtrace verify` does that.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec

from localtrace.errors import BundleError, StoreFormatError
from localtrace.schema import TABLES
from localtrace.store.files import read_file

BUNDLE_VERSION = 1
"""Version of the bundle's own layout; a reader refuses a higher one."""
BAGIT_TEXT = b"BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n"
BAGIT_FILE = "bagit.txt"
BAG_INFO_FILE = "bag-info.txt"
MANIFEST_FILE = "manifest-sha256.txt"
TAG_MANIFEST_FILE = "tagmanifest-sha256.txt"
SIGNATURE_FILE = "tagmanifest-sha256.txt.sig"
INFO_FILE = "bundle.json"
TRACE_IDS_FILE = "trace_ids.txt"
TEXTS_FILE = "texts.jsonl.gz"
SUMMARY_FILE = "summary.html"
TAG_FILES = (BAGIT_FILE, BAG_INFO_FILE, MANIFEST_FILE)
"""The files that the tag manifest names."""

_FILES_MAX = 100_000
_MANIFEST_MAX_BYTES = 32 * 2**20
_SMALL_MAX_BYTES = 2**20
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_PAYLOAD = re.compile(
    r"data/(?:localtrace\.json|bundle\.json|trace_ids\.txt|texts\.jsonl\.gz|summary\.html"
    rf"|tables/(?:{'|'.join(TABLES)})/v\d{{1,9}}-[0-9a-f]{{32}}\.parquet"
    r"|tokenizers/[0-9a-f]{64}/tokenizer\.json"
    r"|tokenizers/runs/[\w.~=-]{1,255})",
    re.ASCII,
)
_PART = re.compile(r"\d{3,9}", re.ASCII)

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Number = Annotated[int, msgspec.Meta(ge=1, le=10**9)]


class Previous(msgspec.Struct, frozen=True):
    """The bag that comes before another one."""

    bundle_id: Digest
    tagmanifest_sha256: Digest


class BundleInfo(msgspec.Struct, frozen=True):
    """The content of bundle.json."""

    format_version: Annotated[int, msgspec.Meta(ge=1)]
    bundle_id: Digest
    """sha256 of the manifest's lines, those of bundle.json and the summary left out."""
    series_id: Digest
    """Identity of the whole bundle, the same in all its parts."""
    part: Number
    parts: Number
    sequence: Number
    """Position among this bundle's parts and those of the bundles that it continues."""
    previous: Previous | None
    store_id: Annotated[str, msgspec.Meta(max_length=200)]
    selection: str
    """The selection in words."""
    counts: dict[str, Count]
    """Rows by table."""
    redactions: dict[str, Count]
    """Number of replacements by rule."""
    left_out: dict[str, Count]
    """Number of trajectories of these runs that the selection left out, by reason."""
    unsearched: dict[str, Count] = msgspec.field(default_factory=dict)
    """Number of values that could not be searched for keys, by kind; empty in older bundles."""


@dataclass(frozen=True, slots=True)
class Bag:
    """One bag whose names and kinds of files are right."""

    root: Path
    info: BundleInfo
    files: dict[str, str]
    """sha256 of every file of the payload, by names such as data/bundle.json."""
    wrong_size: str = ""
    """Error if the files have other sizes in sum than the bag says; which, only checksums tell."""

    @property
    def data(self) -> Path:
        """The folder of the payload, laid out like a store."""
        return self.root / "data"

    def table_files(self, table: str) -> list[Path]:
        """Return the Parquet files of a table."""
        above = f"data/tables/{table}/"
        return [self.root / name for name in sorted(self.files) if name.startswith(above)]


def open_bundle(path: Path) -> tuple[Bag, ...]:
    """Return the bags of a bundle in order, after a quick check; none if `path` is no bundle.

    Raises:
        BundleError: it is a bundle, and it is incomplete, damaged or hostile.
    """
    bags = find_bags(path)
    for bag in bags:
        if bag.wrong_size:
            raise BundleError(f"{bag.wrong_size}: localtrace verify tells which")
    return bags


def find_bags(path: Path) -> tuple[Bag, ...]:
    """Return the same as `open_bundle`, but also bags with files of wrong sizes."""
    root = path.parent if path.name == "data" and os.path.lexists(path / INFO_FILE) else path
    if _looks_like_bag(root):
        return (load_bag(root),)
    if not os.path.isdir(root):
        return ()
    parts = sorted(entry.name for entry in os.scandir(root) if _PART.fullmatch(entry.name))
    if not any(_looks_like_bag(root / part) for part in parts):
        return ()
    for name in sorted(os.listdir(root)):
        if name not in parts:
            raise BundleError(f"{root / name}: does not belong to the bundle: remove it")
    return _series([load_bag(root / part) for part in sorted(parts, key=int)])


def _looks_like_bag(root: Path) -> bool:
    return os.path.lexists(root / BAGIT_FILE) or os.path.lexists(root / "data" / INFO_FILE)


def _series(bags: list[Bag]) -> tuple[Bag, ...]:
    first = bags[0].info
    found = set()
    for bag in bags:
        info = bag.info
        if info.series_id != first.series_id or info.parts != first.parts:
            raise BundleError(f"{bag.root}: is a part of another bundle: move it elsewhere")
        if bag.root.name != part_name(info.part):
            raise BundleError(
                f"{bag.root}: holds part {info.part}, so the parts are in the wrong order: "
                f"rename it {part_name(info.part)}"
            )
        found.add(info.part)
    if missing := [n for n in range(1, min(first.parts, _FILES_MAX) + 1) if n not in found]:
        raise BundleError(
            f"{bags[0].root.parent}: part {missing[0]} of {first.parts} is missing: bring it, or "
            "name a single part to read it alone"
        )
    return tuple(bags)


def part_name(part: int) -> str:
    """Return the name of a part's folder."""
    return f"{part:03d}"


def load_bag(root: Path) -> Bag:
    """Check the structure of one bag: its names, sizes and numbers of files, and no links.

    Raises:
        BundleError: naming the file that is missing, not expected, or not what it should be.
    """
    if root.is_symlink():
        raise BundleError(f"{root}: is a link: name the folder that it leads to")
    known = {*TAG_FILES, TAG_MANIFEST_FILE, SIGNATURE_FILE}
    names = set()
    for entry in _entries(root):
        names.add(entry.name)
        expected = stat.S_ISDIR if entry.name == "data" else stat.S_ISREG
        if entry.name not in known | {"data"} or not expected(_mode(entry)):
            raise _unexpected(Path(entry.path))
    for name in sorted(known | {"data"}):
        if name not in names and name != SIGNATURE_FILE:
            raise BundleError(f"{root / name}: is missing; copy the bundle again")
    info = _read_info(root / "data" / INFO_FILE)
    if read_limited(root / BAGIT_FILE) != BAGIT_TEXT:
        raise BundleError(f"{root / BAGIT_FILE}: is damaged: copy the bundle again")
    files = read_manifest(root / MANIFEST_FILE)
    for name in files:
        if not _PAYLOAD.fullmatch(name):
            raise BundleError(f"{root / MANIFEST_FILE}: names {name!r}, which no bundle holds")
    return Bag(root, info, files, _check_payload(root, files))


def _read_info(path: Path) -> BundleInfo:
    text = read_limited(path)
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        version = msgspec.json.decode(fields["format_version"], type=int)
        if version > BUNDLE_VERSION:
            raise BundleError(
                f"{path}: has version {version}, this localtrace reads up to {BUNDLE_VERSION}: "
                "upgrade localtrace"
            )
        return msgspec.json.decode(text, type=BundleInfo)
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{path}: is damaged ({error}): copy the bundle again") from None


def read_manifest(path: Path) -> dict[str, str]:
    """Read the sha256 of each file by its name; names are not checked.

    Raises:
        BundleError: it is too large, or a line is not of the one form that sha256sum writes.
    """
    try:
        text = read_limited(path, _MANIFEST_MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise BundleError(f"{path}: is not text: copy the bundle again") from None
    files: dict[str, str] = {}
    lines = text.split("\n")
    for line in lines[:-1]:
        match = _LINE.fullmatch(line)
        if match is None or match[2] in files or len(files) >= _FILES_MAX:
            raise BundleError(f"{path}: the line {line[:200]!r} is damaged or not expected")
        files[match[2]] = match[1]
    if lines[-1]:
        raise BundleError(f"{path}: its last line is cut: copy the bundle again")
    return files


def _check_payload(root: Path, files: dict[str, str]) -> str:
    """Check the names of all files; return the error if their sizes are wrong."""
    size_bytes, found = 0, set()
    folders = {str(folder) for name in files for folder in PurePosixPath(name).parents}
    for entry in _walk(root / "data"):
        name = Path(entry.path).relative_to(root).as_posix()
        is_folder = entry.is_dir(follow_symlinks=False)
        if name not in (folders if is_folder else files):
            raise _unexpected(Path(entry.path))
        if is_folder:
            continue
        found.add(name)
        size_bytes += entry.stat(follow_symlinks=False).st_size
    for name in sorted(files.keys() - found):
        raise BundleError(f"{root / name}: is missing; copy the bundle again")
    oxum = f"Payload-Oxum: {size_bytes}.{len(files)}".encode()
    if oxum in read_limited(root / BAG_INFO_FILE).split(b"\n"):
        return ""
    return f"{root}: one of its files was cut or changed, as {BAG_INFO_FILE} shows"


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield all files and folders below a folder; refuse anything else."""
    folders = [folder]
    while folders:
        for entry in _entries(folders.pop()):
            mode = _mode(entry)
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                raise _unexpected(Path(entry.path))
            yield entry  # before a folder is entered, so that one may be refused
            if stat.S_ISDIR(mode):
                folders.append(Path(entry.path))


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        raise BundleError(f"{folder}: cannot be read ({error.strerror})") from error


def _mode(entry: os.DirEntry[str]) -> int:
    return entry.stat(follow_symlinks=False).st_mode


def _unexpected(path: Path) -> BundleError:
    if path.name == ".DS_Store" or path.name.startswith("._"):
        return BundleError(
            f"{path}: was left by macOS, and does not belong to the bundle: remove all such files "
            "(find BUNDLE -name '._*' -o -name .DS_Store)"
        )
    what = "is a link" if path.is_symlink() else "does not belong to the bundle"
    return BundleError(f"{path}: {what}: do not use this bundle unless you know why it is there")


def read_limited(path: Path, max_bytes: int = _SMALL_MAX_BYTES) -> bytes:
    """Read a small file, following no link.

    Raises:
        BundleError: it is missing, a link, or larger.
    """
    try:
        return read_file(path, max_bytes)
    except StoreFormatError as error:
        raise BundleError(str(error)) from error
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror})") from error
