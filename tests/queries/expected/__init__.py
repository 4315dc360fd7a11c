"""The right answer of each named query, from `facts.py`, as the query's description says.

One function per query, of the same name and parameters, in one of the modules. It returns a frame
whose columns are those of the query; their order and that of the rows mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.queries.expected import answers, calls, rewards
from tests.queries.facts import Frame


def answer_of(query: str) -> Callable[..., Frame]:
    """Return the function that works out the answer of a query."""
    modules = (answers, calls, rewards)
    return next(getattr(module, query) for module in modules if hasattr(module, query))
