"""Writes the generated parts of the docs, or checks that they are current (`--check`).

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from localtrace.schema import TABLES

ROOT = Path(__file__).resolve().parents[2]


def columns() -> str:
    """The tables and their columns, from the schema."""
    parts = []
    for table in TABLES.values():
        partitions = ", ".join(f"`{name}`" for name in table.partitions) or "none"
        order = ", ".join(f"`{name}`" for name in table.sort_by)
        parts.append(f"### `{table.name}`\n\nPartitions: {partitions}. Sorted by {order}.\n")
        parts.append("| column | type | what it holds |\n|---|---|---|")
        parts += [
            f"| `{column.name}` | {column.type} | {column.about} |" for column in table.columns
        ]
        parts.append("")
    return "\n".join(parts).rstrip()


GENERATED = {"localtrace/store/README.md": {"columns": columns}}


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
