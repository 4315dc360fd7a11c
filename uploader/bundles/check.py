"""Check every byte of a bundle. Its content is hostile input until it has been checked."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from localtrace.errors import BundleError, StoreFormatError
from localtrace.schema import TABLES, refuse_other_version
from localtrace.store.bundle import (
    INFO_FILE,
    MANIFEST_FILE,
    TAG_FILES,
    TAG_MANIFEST_FILE,
    TRACE_IDS_FILE,
    Bag,
    find_bags,
    read_limited,
    read_manifest,
)
from localtrace.store.files import open_file, read_json
from localtrace.store.layout import META_NAME, StoreMeta
from localtrace.terminal import escape_line
from localtrace.uploader.bundles.manifest import bundle_id_of, previous_of
from localtrace.uploader.bundles.pages import TableFile, read_pages
from localtrace.uploader.bundles.signature import who_signed

_ID_LINE_BYTES = 33
_BLOCK_BYTES = 2**20
_TABLE_FILE = re.compile(r"data/tables/(\w+)/v(\d+)-([0-9a-f]{32})\.parquet")

Progress = Callable[[int, int], None]
"""Callback that gets the numbers of files checked and of all files."""


@dataclass(slots=True)
class BundleReport:
    """The result of checking bundles."""

    bags: list[Bag] = field(default_factory=list)
    """The bags that could be opened, in the order of their sequence."""
    files: int = 0
    size_bytes: int = 0
    signers: list[str] = field(default_factory=list)
    """One line per signed bag: its folder and its signer."""
    problems: list[str] = field(default_factory=list)
    """One line per problem, with the file concerned."""

    @property
    def trajectories(self) -> int:
        """Number of trajectories in all bags."""
        return sum(bag.info.counts.get("trajectories", 0) for bag in self.bags)

    def require(self) -> None:
        """Do nothing if the bundle is sound.

        Raises:
            BundleError: it has a problem; the message is the first one.
        """
        if self.problems:
            raise BundleError(self.problems[0])


def check_bundle(
    path: Path, progress: Progress | None = None, signers: Path | None = None
) -> BundleReport:
    """Check one bundle: a bag, or the folder of all its parts."""
    return check_bundles([path], progress, signers)


def check_bundles(
    paths: Iterable[Path], progress: Progress | None = None, signers: Path | None = None
) -> BundleReport:
    """Check bundles one by one, and that their sequence has no gap.

    Args:
        paths: bags, folders of parts, or folders that hold several of these.
        progress: called with the numbers of files checked and of all files.
        signers: a file of allowed signers. If given, one of them must have signed every bag.

    Raises:
        ConfigError: the file of signers cannot be read, or there is no OpenSSH to check with.
    """
    report = BundleReport()
    for path in paths:
        _open(path.expanduser().absolute(), report, nested=True)
    report.bags.sort(key=lambda bag: (bag.info.sequence, bag.root))
    total = sum(len(bag.files) for bag in report.bags)
    for bag in report.bags:
        _check_bag(bag, report, total, progress, signers)
    report.problems += _gaps(report.bags)
    return report


def _open(path: Path, report: BundleReport, nested: bool) -> None:
    try:
        bags = find_bags(path)
    except BundleError as error:
        report.problems.append(str(error))
        return
    report.bags += bags
    if bags:
        return
    inner = sorted(p for p in path.iterdir() if p.is_dir()) if nested and path.is_dir() else []
    before = len(report.bags) + len(report.problems)
    for folder in inner:
        if not folder.name.startswith("."):
            _open(folder, report, nested=False)
    if len(report.bags) + len(report.problems) == before:
        report.problems.append(f"{path}: is not a bundle: name the folder that localtrace made")


def _check_bag(
    bag: Bag,
    report: BundleReport,
    total: int,
    progress: Progress | None,
    signers: Path | None,
) -> None:
    problems: list[str] = []
    try:
        problems += _tag_problems(bag)
        signer = who_signed(bag, signers)
        if signer is not None:
            report.signers.append(f"{bag.root}: {signer}")
        elif signers is not None:
            problems.append(f"{bag.root}: is not signed: ask the sender to sign it")
        whole = True
        for name, digest in sorted(bag.files.items()):
            found = _checked_sha256(bag.root / name, report)
            if found != digest:
                whole = False
                problems.append(f"{bag.root / name}: its checksum is wrong: copy it again")
            report.files += 1
            if progress is not None:
                progress(report.files, total)
        if whole and bag.wrong_size:
            problems.append(bag.wrong_size)
        elif whole:  # never give the Parquet reader bytes whose checksum is wrong
            problems += _content_problems(bag)
    except BundleError as error:
        problems.append(str(error))
    report.problems += problems


def _tag_problems(bag: Bag) -> list[str]:
    tags = read_manifest(bag.root / TAG_MANIFEST_FILE)
    if set(tags) != set(TAG_FILES):
        return [f"{bag.root / TAG_MANIFEST_FILE}: does not name {', '.join(TAG_FILES)}"]
    return [
        f"{bag.root / name}: its checksum is wrong: copy it again"
        for name, digest in tags.items()
        if _checked_sha256(bag.root / name) != digest
    ]


def _checked_sha256(path: Path, report: BundleReport | None = None) -> str:
    digest = hashlib.sha256()
    try:
        with open(open_file(path), "rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                if report is not None:
                    report.size_bytes += len(block)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror or error})") from error
    return digest.hexdigest()


def _content_problems(bag: Bag) -> list[str]:
    problems = []
    if bundle_id_of(bag.files) != bag.info.bundle_id:
        problems.append(f"{bag.data / INFO_FILE}: its id is not that of {MANIFEST_FILE}")
    try:
        meta = read_json(bag.data / META_NAME, StoreMeta)
        refuse_other_version(bag.root, meta.format_version)
        if meta.store_id != bag.info.store_id:
            problems.append(f"{bag.data / META_NAME}: is of another store")
    except StoreFormatError as error:
        problems.append(str(error))
    for name in sorted(bag.files):
        if name.startswith("data/tokenizers/"):
            problems += _tokenizer_problems(bag, name)
    if problems:
        return problems  # reading all tables takes long, and the bundle is refused anyway
    rows, problems = _table_rows(bag)
    size_bytes = (bag.data / TRACE_IDS_FILE).stat().st_size
    if not problems and (
        rows != bag.info.counts or size_bytes != _ID_LINE_BYTES * rows["trajectories"]
    ):
        problems.append(f"{bag.data / INFO_FILE}: counts other rows than the tables hold")
    return problems


def _table_rows(bag: Bag) -> tuple[dict[str, int], list[str]]:
    """Return the number of rows by table, and the problems of the table files."""
    rows, problems = dict.fromkeys(TABLES, 0), []
    files = []
    for name in sorted(bag.files):
        if match := _TABLE_FILE.fullmatch(name):
            try:
                refuse_other_version(bag.root / name, int(match[2]))
            except StoreFormatError as error:
                problems.append(str(error))
            else:
                if bag.files[name].startswith(match[3]):
                    files.append(TableFile(str(bag.root / name), match[1]))
                else:
                    problems.append(f"{bag.root / name}: its name does not match its content")
    for file, pages in zip(files, read_pages(files), strict=True):
        rows[file.table] += pages.rows
        if pages.problem:
            problems.append(f"{file.path}: {escape_line(pages.problem)}: do not use this bundle")
    return rows, problems


def _tokenizer_problems(bag: Bag, name: str) -> list[str]:
    _, _, kind, last = name.split("/")
    if kind != "runs":
        same = kind == bag.files[name]
        return [] if same else [f"{bag.root / name}: its folder is named like another content"]
    digest = read_limited(bag.root / name, 64).decode("ascii", "replace")
    if f"data/tokenizers/{digest}/tokenizer.json" in bag.files:
        return []
    return [f"{bag.root / name}: the tokenizer of run {last} is not in the bundle"]


def _gaps(bags: Sequence[Bag]) -> list[str]:
    """Return the gaps and breaks between bags, which are in the order of their sequence."""
    problems = []
    for before, bag in pairwise(bags):
        number, expected = bag.info.sequence, before.info.sequence + 1
        if number > expected:
            missing = f"{expected}" if number == expected + 1 else f"{expected} to {number - 1}"
            problems.append(f"{bag.root}: has number {number}, and {missing} is missing: bring it")
        elif number < expected or bag.info.previous != previous_of(before):
            problems.append(
                f"{bag.root}: number {number} does not continue {before.root}: one of them is of "
                "another sequence"
            )
    return problems
