"""Trajectories as trees, as a tracker shows them, and the differences of two of them.

Ids and clock times are left out; the order in which calls began is kept.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Node:
    """One call."""

    name: str
    inputs: Any
    outputs: Any
    start: Any
    """Time of its beginning in any unit: it only orders."""
    facts: dict[str, Any]
    """Everything else that is shown: status, exception, attributes, tags."""
    children: list[Node] = field(default_factory=list)

    def names(self) -> Counter[str]:
        """Count each name in the tree."""
        return Counter([self.name]) + names(self.children)

    def key(self) -> str:
        """The same for the same rollout, whoever shows it."""
        request_id = isinstance(self.inputs, dict) and self.inputs.get("request_id")
        below = [child.key() for child in self.children]
        return json.dumps([self.name, request_id, self.outputs, below], sort_keys=True, default=str)


def tree(nodes: dict[str, Node], parents: dict[str, str | None]) -> list[Node]:
    """Put nodes below their parents; gives those without one."""
    roots = []
    for node_id, node in sorted(nodes.items(), key=lambda item: item[1].start):
        above = nodes.get(parents[node_id] or "")
        (roots if above is None else above.children).append(node)
    return roots


def names(forest: Iterable[Node]) -> Counter[str]:
    """Count each name."""
    return sum((node.names() for node in forest), Counter())


def named(name: str, forest: Iterable[Node]) -> list[Node]:
    """All calls of a name."""
    return [
        one
        for node in forest
        for one in (*[node] * (node.name == name), *named(name, node.children))
    ]


def without(forest: Iterable[Node], left_out: Set[str]) -> list[Node]:
    """The trees without calls of these names, whose children move up."""
    kept = []
    for node in forest:
        below = without(node.children, left_out)
        if node.name in left_out:
            kept += below
        else:
            kept.append(Node(node.name, node.inputs, node.outputs, node.start, node.facts, below))
    return kept


def raised_at(traceback: str | list[dict[str, Any]]) -> Any:
    """The last frame of a traceback: file, line and function."""
    if isinstance(traceback, str):
        return re.findall(r'^  File "(.+)", line (\d+), in (.+)$', traceback, re.MULTILINE)[-1]
    last = traceback[-1]
    return last["filename"], last["line_number"], last["function_name"]


@dataclass
class Comparison:
    """Live traces beside ours."""

    differences: list[str] = field(default_factory=list)
    """Places where the two differ, with both values."""
    only_live: set[str] = field(default_factory=set)
    """Facts that we do not show."""
    only_ours: set[str] = field(default_factory=set)
    """Facts that we add."""
    dropped: set[str] = field(default_factory=set)
    """Fields whose values recording left out, as a receipt names them."""
    numbers: set[str] = field(default_factory=set)
    """Fields with a NumPy number, of which live tracing shows the text."""
    types: set[str] = field(default_factory=set)
    """Span types that we know, where live tracing shows none."""
    tracebacks: set[str] = field(default_factory=set)
    """Tracebacks that both show."""

    def forests(self, live: list[Node], ours: list[Node]) -> Comparison:
        """Compare trajectories, which stand in no order."""
        self._nodes(sorted(live, key=Node.key), sorted(ours, key=Node.key), "")
        return self

    def _nodes(self, live: list[Node], ours: list[Node], where: str) -> None:
        self._values([node.name for node in live], [node.name for node in ours], where)
        for one, other in zip(live, ours, strict=False):
            self._node(one, other, f"{where}/{one.name}")

    def _node(self, live: Node, ours: Node, where: str) -> None:
        self.only_live |= live.facts.keys() - ours.facts.keys()
        self.only_ours |= ours.facts.keys() - live.facts.keys()
        for name in live.facts.keys() & ours.facts.keys():
            if name in ("exception stacktrace", "exception traceback"):
                self.tracebacks.add(name)
                self._values(raised_at(live.facts[name]), raised_at(ours.facts[name]), where)
                continue
            self._values(live.facts[name], ours.facts[name], f"{where} {name}")
        self._values(live.inputs, ours.inputs, f"{where} inputs")
        self._values(live.outputs, ours.outputs, f"{where} outputs")
        self._nodes(live.children, ours.children, where)

    def _values(self, live: Any, ours: Any, where: str) -> None:
        field_name = where.rpartition(".")[2]
        if field_name == "spanType" and live == "UNKNOWN":
            self.types.add(ours)
        elif isinstance(ours, dict) and ours.get("$type") == "omitted":
            self.dropped.add(f"{field_name} ({ours['reason']})")
        elif isinstance(live, dict) and isinstance(ours, dict) and live.keys() == ours.keys():
            for name, value in live.items():
                self._values(value, ours[name], f"{where}.{name}")
        elif isinstance(live, list) and isinstance(ours, list) and len(live) == len(ours):
            for at, value in enumerate(live):
                self._values(value, ours[at], f"{where}[{at}]")
        elif type(ours) is int and live in (str(ours), f"np.int64({ours})"):
            self.numbers.add(field_name)
        elif type(live) is not type(ours) or live != ours:
            self.differences.append(f"{where}: {str(live)[:300]!r} and {str(ours)[:300]!r}")
