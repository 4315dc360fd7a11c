"""Finding stores: from folders, bundles and glob patterns to layouts, each folder once."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from localtrace.errors import StoreNotFound
from localtrace.store.layout import META_NAME, StoreLayout, open_layout, read_meta


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
    layouts: dict[str, StoreLayout] = {}
    for path in paths:
        for layout in _matching(path) if is_pattern(path) else [open_layout(path)]:
            layouts.setdefault(os.path.realpath(layout.root), layout)
    return list(layouts.values())


def of_each_store(layouts: Iterable[StoreLayout]) -> list[Sequence[StoreLayout]]:
    """Group layouts by store: copies and bundles of a store share its id."""
    stores: dict[str, list[StoreLayout]] = {}
    for layout in layouts:
        stores.setdefault(read_meta(layout).store_id, []).append(layout)
    return list(stores.values())


def _matching(pattern: str | Path) -> list[StoreLayout]:
    layouts = []
    for path in sorted(glob.glob(str(Path(pattern).expanduser()))):
        with contextlib.suppress(StoreNotFound):
            layouts.append(open_layout(path))
    if not layouts:
        raise StoreNotFound(
            f"no store matches {pattern}: write a pattern of folders that hold {META_NAME}, "
            "like '/shared/*/localtrace'"
        )
    return layouts
