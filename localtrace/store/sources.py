"""Finding stores: from folders, bundles and glob patterns to layouts, each folder once."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from localtrace.errors import StoreNotFound
from localtrace.store.bundle import INFO_FILE
from localtrace.store.layout import META_NAME, StoreLayout, open_layout, read_meta

_BELOW = {
    f"*/{META_NAME}": "*",
    f"*/{INFO_FILE}": "*",
    f"*/localtrace/{META_NAME}": "*/localtrace",
}
"""Files that stores below a folder would have, and the pattern that names such stores."""


def is_pattern(path: str | Path) -> bool:
    """Tell whether this is a glob pattern, and not the name of a folder that exists."""
    return any(sign in str(path) for sign in "*?[") and not Path(path).expanduser().is_dir()


def find_stores(paths: Iterable[str | Path]) -> list[StoreLayout]:
    """Find the stores and bundles that paths and patterns name, in this order, each folder once.

    Raises:
        StoreNotFound: a path holds no store, or no folder that matches a pattern does.
        StoreFormatError: a path holds something else, or a store of another format version.
        BundleError: one is a bundle that is incomplete, damaged or hostile.
    """
    found: dict[str, StoreLayout] = {}
    for path in paths:
        for layout in _matching(path) if is_pattern(path) else [_named(path)]:
            found.setdefault(os.path.realpath(layout.root), layout)
    return list(found.values())


def of_each_store(layouts: Iterable[StoreLayout]) -> list[Sequence[StoreLayout]]:
    """Group layouts by store: copies and bundles of a store share its id."""
    stores: dict[str, list[StoreLayout]] = {}
    for layout in layouts:
        stores.setdefault(read_meta(layout).store_id, []).append(layout)
    return list(stores.values())


def _matching(pattern: str | Path) -> list[StoreLayout]:
    paths = sorted(glob.glob(str(Path(pattern).expanduser())))
    layouts = []
    for path in paths:
        with contextlib.suppress(StoreNotFound):
            layouts.append(open_layout(path))
    if not layouts:
        found = f"none of {len(paths)} paths is a folder with {META_NAME}" if paths else "no path"
        raise StoreNotFound(
            f"no store matches {pattern} ({found}): write a pattern of folders that hold "
            f"{META_NAME}, like '/shared/*/localtrace'"
        )
    return layouts


def _named(path: str | Path) -> StoreLayout:
    try:
        return open_layout(path)
    except StoreNotFound:
        root = Path(path).expanduser().absolute()
        below = glob.escape(str(root))
        for mark, pattern in _BELOW.items():
            if any(glob.iglob(f"{below}/{mark}")):
                raise StoreNotFound(
                    f"no store at {root}: there are some below it; name them as '{below}/{pattern}'"
                ) from None
        raise
