"""What a tracker shows of a trajectory, as trees that can be compared.

Ids and clock times are left out; the order in which calls began is kept.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Node:
    """One call."""

    name: str
    inputs: Any
    outputs: Any
    failed: bool
    start: Any
    """When it began, in whatever unit: it only orders."""
    attributes: dict[str, Any] = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)

    def names(self) -> Counter[str]:
        """How often each name occurs in the tree."""
        return Counter([self.name]) + sum((child.names() for child in self.children), Counter())

    def without(self, names: Iterable[str]) -> list[Node]:
        """The tree without calls of these names, whose children move up."""
        left = [node for child in self.children for node in child.without(names)]
        if self.name in names:
            return left
        node = Node(self.name, self.inputs, self.outputs, self.failed, self.start, self.attributes)
        node.children = left
        return [node]

    def plain(self) -> dict[str, Any]:
        """What is compared."""
        return {
            "name": self.name,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "failed": self.failed,
            "attributes": self.attributes,
            "children": [child.plain() for child in sorted(self.children, key=_start)],
        }


def _start(node: Node) -> Any:
    return node.start


def tree(nodes: dict[str, Node], parents: dict[str, str | None]) -> list[Node]:
    """Put nodes below their parents; gives those without one."""
    roots = []
    for node_id, node in nodes.items():
        above = nodes.get(parents[node_id] or "")
        (roots if above is None else above.children).append(node)
    return roots


def comparable(nodes: Iterable[Node]) -> list[Any]:
    """Trees as plain values, in an order that does not depend on ids or times."""
    return sorted((node.plain() for node in nodes), key=_text)


def _text(value: Any) -> str:
    return json.dumps(value, default=str, sort_keys=True)


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two plain values differ, with what stands there."""
    if isinstance(left, dict) and isinstance(right, dict):
        missing = [f"{path}.{name} on one side" for name in left.keys() ^ right.keys()]
        shared = left.keys() & right.keys()
        return missing + [
            found
            for name in shared
            for found in differences(left[name], right[name], f"{path}.{name}")
        ]
    if isinstance(left, list) and isinstance(right, list):
        if len(left) != len(right):
            return [f"{path}: {len(left)} and {len(right)} elements"]
        return [
            found
            for at, pair in enumerate(zip(left, right, strict=True))
            for found in differences(*pair, f"{path}[{at}]")
        ]
    same = type(left) is type(right) and left == right
    return [] if same else [f"{path}: {str(left)[:200]!r} and {str(right)[:200]!r}"]
