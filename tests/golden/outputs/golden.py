"""The store of the golden rollouts, and the texts that outputs are reduced to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from click.testing import CliRunner

from localtrace.cli import main
from localtrace.version import __version__

ROOT = Path(__file__).parents[3]
WIDTH = 110
"""A JSON container that fits into a line of this length is written on one."""
VARIABLES = {"TZ": "UTC", "LOGNAME": "ada", "COLUMNS": "100", "LOCALTRACE_STORE": None}
RULES = """
[[pattern]]
name = "customer"
regex = 'ACME'

[[pattern]]
name = "word"
regex = 'w81'

[[field]]
name = "ground_truth"
"""
OFF = "defaults = false\n"


@dataclass(frozen=True)
class Golden:
    """A folder with the store of the golden rollouts, to which outputs may be written."""

    folder: Path
    ids: dict[str, str] = field(compare=False)
    """Trace ids by the name of the rollout."""

    @property
    def store(self) -> Path:
        """The store."""
        return self.folder / "store"

    @property
    def rules(self) -> Path:
        """Rules of redaction, beside the built-in ones."""
        return self.folder / "rules.toml"

    @property
    def no_rules(self) -> Path:
        """A file of rules that takes the built-in ones out."""
        return self.folder / "no-rules.toml"

    def run(self, *arguments: str | Path, exit_code: int | None = 0) -> str:
        """Run a command over the store, and return what it prints."""
        done = CliRunner(env=VARIABLES).invoke(main, [*map(str, arguments), "-s", str(self.store)])
        assert exit_code in (None, done.exit_code), done.output
        return self.plain(done.output)

    def plain(self, text: str) -> str:
        """Replace what differs from place to place and from version to version."""
        text = text.replace(str(self.folder), "FOLDER").replace(__version__, "VERSION")
        text = re.sub(r"127\.0\.0\.1:\d+", "HOST", text)
        text = re.sub(r"\b[0-9a-f]{64}\b", "SHA256", text)
        return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


Output: TypeAlias = Callable[[Golden], str]
"""Makes one output, as the text of its expected file."""


def make_golden(folder: Path) -> Golden:
    """Record the golden rollouts into a new folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.golden.outputs.store", str(folder)]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    golden = Golden(folder, json.loads((folder / "ids.json").read_text()))
    golden.rules.write_text(RULES)
    golden.no_rules.write_text(OFF)
    return golden


def pretty(value: Any, indent: str = "") -> str:
    """Return JSON with a line for each value that is long, whatever the order of its names."""
    line = json.dumps(value, sort_keys=True)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, dict | list) or not value:
        return line
    deeper = indent + " "
    if isinstance(value, dict):
        inside = [f"{json.dumps(str(k))}: {pretty(v, deeper)}" for k, v in sorted(value.items())]
        return "{\n" + ",\n".join(deeper + one for one in inside) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + pretty(one, deeper) for one in value) + f"\n{indent}]"


def pretty_lines(values: Iterable[Any]) -> str:
    """Return values as JSON, one after the other."""
    return "\n".join(map(pretty, values)) + "\n"


def without_digests(value: Any) -> Any:
    """Replace digests by their place: they change with everything else, and say nothing."""
    if isinstance(value, dict):
        return {
            name: "DIGEST" if "digest" in str(name) and inside else without_digests(inside)
            for name, inside in value.items()
        }
    return list(map(without_digests, value)) if isinstance(value, list) else value
