"""Calls that were made outside any trajectory, and that recording gave one of their own."""

from __future__ import annotations

from localtrace.types import Span, Trajectory


def lone_call(trajectory: Trajectory) -> Span | None:
    """Return the call that is all there is of a trajectory: live tracing shows it as the root.

    A trajectory of which more is known, such as a step or a reward, is not the call itself.
    """
    ids = {span.span_id for span in trajectory.spans}
    outermost = [span for span in trajectory.spans if span.parent_id not in ids]
    known = (trajectory.step, trajectory.sample_index, trajectory.group_id, trajectory.reward)
    if len(outermost) != 1 or known != (None,) * 4 or trajectory.attributes or trajectory.outcomes:
        return None
    return outermost[0] if outermost[0].op == trajectory.name else None
