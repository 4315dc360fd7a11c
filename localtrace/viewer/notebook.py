"""Rollouts as parts of a notebook: HTML without scripts, whose style sheet holds inside it only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from markupsafe import Markup

from localtrace.errors import QueryError
from localtrace.types import Trajectory
from localtrace.viewer.rendering import HERE, render
from localtrace.viewer.shown import chosen, facts_of

if TYPE_CHECKING:
    from localtrace.read.store import Store

CHARACTERS_MAX = 200_000
"""The most characters of conversations, which the rollouts share evenly."""
_SECTIONS = ("", "Facts, chips, tags", "Tables", "Texts of models")
"""The sections of the style sheet that notebooks need, by their headings."""
_HEADING = re.compile(r"^/\* ([\w ,]+) \*/$", re.MULTILINE)
_DARK = ':is([data-jp-theme-light="false"], .vscode-dark)'
_LIGHT = ':is([data-jp-theme-light="true"], .vscode-light)'
_ROOTS = (
    (':root:not([data-theme="light"])', f"body:not({_LIGHT}) &"),
    (':root[data-theme="dark"]', f"{_DARK} &"),
    (':root[data-theme="light"]', f"{_LIGHT} &"),
    (":root {", "& {"),
    ("\nhtml {", "\n& {"),
    ("\nbody {", "\n& {"),
)
"""The roots of a page, and those of a notebook's part, in the themes of Jupyter and VS Code."""
_PART = ".localtrace-shown" * 3
"""The part's selector; three times, so that its rules are stronger than Jupyter's own."""
_RESET = """
dl, dt, dd, ul, ol, li, p, pre, code, h1, h2, table, thead, tbody, tr, th, td, details, summary {
  all: revert; box-sizing: border-box;
}
"""
_OWN = """
& { padding: .75rem; border-radius: 6px; overflow: hidden; }
.said { max-height: 24rem; overflow: auto; }
.side { max-height: 40rem; }
details { margin-top: .75rem; }
"""


def one(trajectory: Trajectory) -> str:
    """Return a trajectory that is at hand without its store."""
    return _drawn([trajectory], is_group=False)


def several(store: Store, trace_ids: Sequence[str]) -> str:
    """Return trajectories of a store: one, those of a group, or several compared."""
    try:
        ids, is_group = chosen(store, trace_ids)
    except QueryError as error:
        return str(Markup("<p>{}</p>").format(str(error)))
    return _drawn(list(store.read(ids)), is_group=is_group)


def _drawn(shown: list[Trajectory], *, is_group: bool) -> str:
    if not shown:
        return "<p>no trajectory is chosen</p>"
    page = facts_of(shown, is_group, CHARACTERS_MAX, has_places=False)
    return render("notebook.html", page=page, style=Markup(style_sheet()))


@cache
def style_sheet() -> str:
    """Return the sections of the viewer's style sheet, for the inside of a notebook's part."""
    text = (HERE / "static/viewer.css").read_text("utf-8")
    first, *rest = _HEADING.split(text)
    sections = {"": first, **dict(zip(rest[::2], rest[1::2], strict=True))}
    kept = "".join(sections[name] for name in _SECTIONS)
    for root, inside in _ROOTS:
        kept = kept.replace(root, inside)
    return f"{_PART} {{{_RESET}{kept}{_OWN}}}"
