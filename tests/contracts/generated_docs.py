"""Writes the generated parts of the docs, or checks that they are current (`--check`).

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
from pathlib import Path
from typing import Any

from localtrace import config, described
from localtrace.cli import COMMANDS
from localtrace.schema import TABLES, UPLOADS, Column, TableSchema
from localtrace.sql import load_queries
from localtrace.trainer_hooks.verl.settings import HookSettings

ROOT = Path(__file__).resolve().parents[2]


def columns() -> str:
    """The tables and their columns, from the schema."""
    parts = []
    for table in TABLES.values():
        partitions = ", ".join(f"`{name}`" for name in table.partitions) or "none"
        order = ", ".join(f"`{name}`" for name in table.sort_by)
        parts.append(f"### `{table.name}`\n\nPartitions: {partitions}. Sorted by {order}.\n")
        parts += [_columns_of(table), ""]
    return "\n".join(parts).rstrip()


def uploads() -> str:
    """The columns of the rows of receipts."""
    return _columns_of(UPLOADS)


def _columns_of(table: TableSchema) -> str:
    rows = [
        f"| `{column.name}` | {column.type} | {column.about}{_since(column)} |"
        for column in table.columns
    ]
    return "\n".join(["| column | type | what it holds |\n|---|---|---|", *rows])


def _since(column: Column) -> str:
    return f" (since version {column.since})" if column.since > 1 else ""


def settings() -> str:
    """The settings of a recorder."""
    about = _about(config.Settings)
    rows = ["| argument | variable | what it does |", "|---|---|---|"]
    return "\n".join(
        [*rows, *(f"| `{name}` | {_variable(name)} | {text} |" for name, text in about.items())]
    )


def verl_settings() -> str:
    """The settings of the verl hook."""
    rows = ["| variable | what it does |", "|---|---|"]
    about = _about(HookSettings)
    return "\n".join([*rows, *(f"| {_variable(name)} | {text} |" for name, text in about.items())])


def _variable(name: str) -> str:
    return f"`LOCALTRACE_{name.upper()}`"


def _about(settings: type[Any]) -> dict[str, str]:
    """What each field of a dataclass does, from the text after it, and its default."""
    tree = ast.parse(inspect.getsource(settings))
    body = tree.body[0].body  # type: ignore[attr-defined]
    about = {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(field.target, ast.Name)
        and isinstance(text.value, ast.Constant)
    }
    return {
        field.name: about[field.name].rstrip(".") + _default(field)
        for field in dataclasses.fields(settings)
    }


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if value in (dataclasses.MISSING, None, ()):
        return ""
    if field.name.endswith("_bytes"):
        return f" (default: {value // config.MIB} MiB)"
    return f" (default: {value})"


def commands() -> str:
    """The commands and what each does."""
    rows = ["| command | what it does |", "|---|---|"]
    return "\n".join(
        [*rows, *(f"| `localtrace {name}` | {text} |" for name, text in COMMANDS.items())]
    )


def named_queries() -> str:
    """The named queries, what each shows, and its parameters."""
    rows = ["| query | what it shows | parameters |", "|---|---|---|"]
    for query in load_queries().values():
        names = ", ".join(
            f"**`{name}`**" if needed else f"`{name}`" for name, needed in query.parameters.items()
        )
        rows.append(f"| `{query.name}` | {query.description} | {names} |")
    return "\n".join(rows)


def views() -> str:
    """Every view: what its rows are, and its columns."""
    parts = []
    for view, about in described.views().items():
        rows = [
            f"| `{one.name}` | {one.type} | {one.about} |" for one in described.columns_of(view)
        ]
        table = "\n".join(["| column | type | what it holds |\n|---|---|---|", *rows])
        parts += [f"### `{view}`", "", about, "", table, ""]
    return "\n".join(parts).rstrip()


GENERATED = {
    "queries/README.md": {"queries": named_queries, "views": views},
    "localtrace/store/README.md": {"columns": columns, "uploads": uploads},
    "README.md": {"settings": settings, "commands": commands},
    "trainer_hooks/verl/README.md": {"settings": verl_settings},
}


def render(text: str, name: str, content: str) -> str:
    """Replace one generated part."""
    start, end = f"<!-- generated: {name} -->", "<!-- end -->"
    pattern = re.compile(f"{re.escape(start)}\n.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"no part {name!r} to generate")
    return pattern.sub(lambda _: f"{start}\n{content}\n{end}", text, count=1)


def main() -> int:
    """Write or check every generated part; 1 when a check fails."""
    stale = []
    for path, parts in GENERATED.items():
        file = ROOT / path
        text = old = file.read_text("utf-8")
        for name, content in parts.items():
            text = render(text, name, content())
        if text != old:
            stale.append(path)
            if "--check" not in sys.argv:
                file.write_text(text, "utf-8")
    if stale and "--check" in sys.argv:
        print(f"not current: {', '.join(stale)}; run make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
