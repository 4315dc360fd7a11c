"""All outputs by name, and how they differ from their files."""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

from tests.golden.outputs import commands, exports, pages, uploads
from tests.golden.outputs.golden import Output

EXPECTED = Path(__file__).parent / "expected"
OUTPUTS: dict[str, Output] = {
    f"{kind}/{name}": output
    for kind, outputs in {
        "commands": commands.OUTPUTS,
        "exports": exports.OUTPUTS,
        "pages": pages.OUTPUTS,
        "uploads": uploads.OUTPUTS,
    }.items()
    for name, output in outputs.items()
}
NEEDED = {"exports/inspect": "inspect_ai"}
"""Packages that an output needs and only the environment of tests/formats has."""


def expected_path(name: str) -> Path:
    """Return the file of an output."""
    return EXPECTED / f"{name}.txt"


def difference(name: str, output: str) -> str:
    """Return a diff between the file of an output and the output; empty where they are the same."""
    path = expected_path(name)
    before = path.read_text().splitlines() if path.exists() else []
    lines = unified_diff(before, output.splitlines(), f"expected/{name}", "now", lineterm="", n=2)
    return "\n".join(lines)
