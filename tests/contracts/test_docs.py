"""The pages of the repository: links lead somewhere, commands are ones that `localtrace` takes."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from localtrace.cli import main

ROOT = Path(__file__).resolve().parents[2]
_LISTED = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
)
PAGES = [path for path in _LISTED.stdout.split() if path != "CHANGELOG.md"]
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return _BLOCK.sub("", page.read_text("utf-8"))


@cache
def anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading(page: str) -> None:
    for link in _LINK.findall(prose(ROOT / page)):
        path, _, anchor = link.partition("#")
        if not path.startswith(("http://", "https://")):
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def commands(page: str) -> Iterator[list[str]]:
    """The `localtrace` commands in the blocks of a page, as their arguments."""
    for language, block in _BLOCK.findall((ROOT / page).read_text("utf-8")):
        statement = ""
        for line in block.replace("\\\n", " ").splitlines() if language in ("", "sh") else []:
            statement += line.removeprefix("$ ") + "\n"
            try:
                words = shlex.split(statement, comments=True)
            except ValueError:  # a quotation that ends on a later line
                continue
            if words[:1] == ["localtrace"]:
                yield words[1 : words.index(">") if ">" in words else None]
            statement = ""


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))])
def test_every_command_shown_has_arguments_that_it_takes(page: str) -> None:
    for name, *arguments in commands(page):
        command = main.get_command(click.Context(main), name)
        while isinstance(command, click.Group) and arguments:
            name = arguments.pop(0)
            command = command.get_command(click.Context(command), name)
        assert command is not None, name
        command.make_context(name, arguments, resilient_parsing=False)
