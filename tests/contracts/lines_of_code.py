"""Print how many lines of code each room has: neither blank, comment nor docstring.

    python -m tests.contracts.lines_of_code [FOLDER ...]

A string that stands alone as a statement counts as a docstring.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("localtrace", "uploader", "trainer_hooks")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of_code(source: str) -> int:
    """Return the number of lines of Python that are neither blank, comment nor docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def main(folders: list[str]) -> None:
    """Print a line for each room, largest first, and the sum."""
    rooms: Counter[str] = Counter()
    for folder in folders or PRODUCT:
        for path in (ROOT / folder).rglob("*.py"):
            room = "/".join(path.relative_to(ROOT).parts[:2])
            rooms[room] += lines_of_code(path.read_text("utf-8"))
    for room, count in rooms.most_common():
        print(f"{count:7,} {room}")
    print(f"{rooms.total():7,} in all")


if __name__ == "__main__":
    main(sys.argv[1:])
