"""`localtrace stats`: how much a store holds, and what was lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localtrace.cli.options import format_option, store_option

if TYPE_CHECKING:
    from localtrace.reader import Store


@click.command()
@store_option
@format_option
def command(store_path: Path, form: str) -> None:
    """Count rows, files and bytes, and what recorders had to leave out."""
    import pyarrow as pa

    from localtrace.cli.output import print_table
    from localtrace.reader import open_store
    from localtrace.store.layout import open_layout

    layout = open_layout(store_path)
    with open_store(store_path) as store:
        rows = [*_tables(store), *_unreadable(store), *_lost(store)]
    journals = chain(*(folder.glob("*.journal*") for folder in layout.journal_folders()))
    rows.append(_files("journals", journals))
    rows.append(_files("quarantine", layout.quarantine.glob("*")))
    columns = ("what", "rows", "unsealed_rows", "files", "size_bytes")
    print_table(pa.table({name: [row.get(name) for row in rows] for name in columns}), form)


def _tables(store: Store) -> list[dict[str, Any]]:
    from localtrace.schema import TABLES

    rows = []
    for name in TABLES:
        count = store.sql(f"select count(*) as n from stored.{name}").to_dicts()[0]["n"]
        unsealed = store.snapshot.pending[name].num_rows
        files = _files(name, map(Path, store.files(name)))
        rows.append({**files, "rows": count, "unsealed_rows": unsealed})
    return rows


def _unreadable(store: Store) -> list[dict[str, Any]]:
    damage = asdict(store.snapshot.damage)
    return [
        {"what": f"unreadable {what}", "rows": count} for what, count in damage.items() if count
    ]


def _lost(store: Store) -> list[dict[str, Any]]:
    counts: Counter[str] = Counter()
    for row in store.sql("select unnest(losses) as losses from runs").to_dicts():
        for kind, reasons in json.loads(row["losses"]).items():
            for reason, count in reasons.items():
                counts[f"lost {kind}: {reason}"] += count
    return [{"what": what, "rows": count} for what, count in sorted(counts.items())]


def _files(what: str, paths: Iterable[Path]) -> dict[str, Any]:
    sizes = []
    for path in paths:
        with suppress(FileNotFoundError):  # a sealer may be at work
            sizes.append(path.stat().st_size)
    return {"what": what, "files": len(sizes), "size_bytes": sum(sizes)}
