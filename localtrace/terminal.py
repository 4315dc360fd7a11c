"""Text that is safe to print: what models and servers wrote may hold terminal commands."""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but for tab and new line
    r"\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # invisible, bidirectional
    r"\ud800-\udfff]"  # lone surrogates
)


def escape(text: str) -> str:
    r"""Replace control and invisible characters by their escapes, such as \u001b.

    Tabs and line ends stay. Text without backslashes keeps being valid JSON if it was.
    """
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def escape_line(text: str) -> str:
    r"""The same for text that must stay on one line: tabs and line ends become \t and \n."""
    return escape(text).replace("\n", "\\n").replace("\t", "\\t")
