"""The folders of a store, and how a store is made and recognised."""

from __future__ import annotations

import contextlib
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from localtrace.errors import StoreFormatError, StoreNotFound, StoreUnwritable
from localtrace.schema import FORMAT_VERSION, TABLES, refuse_other_version
from localtrace.store.addresses import refuse_address
from localtrace.store.bundle import Bag, open_bundle
from localtrace.store.files import (
    explained,
    probe_write,
    read_json,
    refuse_other_than_folder,
    sync,
)
from localtrace.version import __version__

META_NAME = "localtrace.json"
LOG, REPLACED, REWRITING = "_delta_log", "_replaced", "_rewriting"
"""Folders of a table: its log, notes of files to delete, and drafts of files."""
_FOLDERS = (
    "journals", "tables", "quarantine", "tokenizers", "tokenizers/runs", "sampling", "receipts",
    "gathering", "gathered",
    *(f"tables/{table}/{folder}" for table in TABLES for folder in ("", LOG, REPLACED, REWRITING)),
)  # fmt: skip
"""Folders of a store that have fixed names."""
_NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs", "nfs4", "lustre", "cifs", "smb3", "smbfs", "ceph", "gpfs", "beegfs", "afs",
        "glusterfs", "fuse.glusterfs", "fuse.sshfs", "fuse.ceph", "fuse.juicefs", "wekafs",
        "orangefs",
    }
)  # fmt: skip


class StoreMeta(msgspec.Struct):
    """The content of localtrace.json."""

    format_version: Annotated[int, msgspec.Meta(ge=1)]
    store_id: str
    created_by: str


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """The folders of one store, or of a bundle, which is read like one and never written."""

    root: Path
    bags: tuple[Bag, ...] = ()
    """The parts of a bundle; none where this is a store."""

    @property
    def meta(self) -> Path:
        """The file that makes a folder a store."""
        return self._data / META_NAME

    @property
    def _data(self) -> Path:
        # Every part of a bundle holds the same tokenizers and the same origin.
        return self.bags[0].data if self.bags else self.root

    @property
    def tables(self) -> Path:
        """One Delta Lake table per folder."""
        return self.root / "tables"

    @property
    def journals(self) -> Path:
        """Journals and their writers' lock files; pointers to journal folders elsewhere."""
        return self.root / "journals"

    @property
    def quarantine(self) -> Path:
        """Files that could not be read, kept for a person to look at."""
        return self.root / "quarantine"

    @property
    def tokenizers(self) -> Path:
        """Tokenizer files, one folder per content."""
        return self._data / "tokenizers"

    @property
    def sampling(self) -> Path:
        """The rules of runs that have any: which trajectories keep their spans."""
        return self.root / "sampling"

    @property
    def receipts(self) -> Path:
        """Receipts of uploads, brought back."""
        return self.root / "receipts"

    @property
    def gathering(self) -> Path:
        """Files of other stores on their way into this one, one folder per store."""
        return self.root / "gathering"

    @property
    def gathered(self) -> Path:
        """Notes on which of this store's rows others hold, one file per store."""
        return self.root / "gathered"

    def table(self, name: str) -> Path:
        """Return the folder of one table."""
        return self.tables / name

    def refuse_bundle(self) -> None:
        """Refuse to write into a bundle.

        Raises:
            StoreUnwritable: this is a bundle.
        """
        if self.bags:
            raise StoreUnwritable(
                f"{self.root} is a bundle, which is only read: name a store to write to"
            )


def open_layout(path: str | Path) -> StoreLayout:
    """Find an existing store or bundle.

    Raises:
        StoreNotFound: nothing is there.
        StoreFormatError: it is something else, of another format version, or at a path that cannot
            be that of a store.
        NotAFolder: one of its folders is a link.
        BundleError: it is a bundle that is incomplete, damaged or hostile.
    """
    root = Path(path).expanduser().absolute()
    if not root.is_dir():
        raise StoreNotFound(
            f"no store at {root}: record one with localtrace.init({str(path)!r}), "
            "or name another with --store"
        )
    layout = StoreLayout(root, open_bundle(root))
    if not layout.bags and layout.meta.exists():
        refuse_address(root)
    meta_path = layout.meta
    try:
        meta = read_meta(layout)
    except FileNotFoundError:
        raise StoreNotFound(
            f"no store at {root}: expected {meta_path}; name the folder that holds it"
        ) from None
    refuse_other_version(root, meta.format_version)
    if not layout.bags:
        for name in _FOLDERS:
            refuse_other_than_folder(root / name)
    return layout


def read_meta(layout: StoreLayout) -> StoreMeta:
    """Read localtrace.json of a store.

    Raises:
        FileNotFoundError: there is none.
        StoreFormatError: it cannot be read.
    """
    return read_json(layout.meta, StoreMeta)


def create_layout(path: Path) -> StoreLayout:
    """Open the store at `path`, or make one in a new or empty folder.

    Several processes may call this at once: the first one that links its file wins.

    Raises:
        StoreFormatError: the folder holds something else, or a store of another format version, or
            its path cannot be that of a store.
        StoreUnwritable: the folder cannot be made or written.
    """
    layout = StoreLayout(path)
    refuse_address(path.absolute())
    with explained(f"cannot write a store at {path}", "name a folder that this user can write"):
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not layout.meta.exists() and not open_bundle(path):
                _write_meta(layout)
            layout = open_layout(path)
            layout.refuse_bundle()
            layout.journals.mkdir(exist_ok=True)
            probe_write(layout.journals)
        except FileExistsError:
            raise StoreFormatError(f"{path} is a file, not a folder: name another path") from None
    return layout


def meta_text(meta: StoreMeta) -> bytes:
    """Encode the content of localtrace.json."""
    return msgspec.json.format(msgspec.json.encode(meta)) + b"\n"


def _write_meta(layout: StoreLayout) -> None:
    known = {"journals", "tables", "quarantine", "tokenizers", "sampling", META_NAME}
    strangers = [
        entry.name
        for entry in layout.root.iterdir()
        if entry.name not in known and not entry.name.startswith(f".{META_NAME}")
    ]
    if strangers:
        raise StoreFormatError(
            f"{layout.root} is not a store and not empty (it holds {strangers[0]!r}): "
            "name a new folder"
        )
    meta = StoreMeta(FORMAT_VERSION, uuid.uuid4().hex, f"localtrace {__version__}")
    draft = layout.root / f".{META_NAME}.{uuid.uuid4().hex}"
    draft.write_bytes(meta_text(meta))
    sync(draft)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(draft, layout.meta)
    finally:
        draft.unlink()
    sync(layout.root)


def on_network(path: Path) -> bool:
    """Tell whether a path is on a network file system, which cannot hold journals."""
    return network_of(path) is not None


def network_of(path: Path) -> str | None:
    """Return the type of the network file system that holds `path`; None for a local disk."""
    kind = file_system_of(path)
    return kind if kind in _NETWORK_FILE_SYSTEMS else None


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the type of the file system that holds `path`, such as ext4; None where unknown.

    Reads the mount table that proc_pid_mountinfo(5) describes, which only Linux has.
    """
    try:
        lines = mounts.read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    target = os.path.realpath(path)
    best, kind = "", None
    for line in lines:
        left, _, right = line.partition(" - ")
        escaped = left.split()[4].encode()  # octal, byte by byte
        mount_point = escaped.decode("unicode_escape").encode("latin-1").decode("utf-8", "replace")
        inside = target == mount_point or target.startswith(mount_point.rstrip("/") + "/")
        if inside and len(mount_point) >= len(best):
            best, kind = mount_point, right.split()[0]
    return kind
