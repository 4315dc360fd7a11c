"""The reward function; verl loads this file."""


def compute_score(data_source, solution_str, ground_truth, extra_info, **_):
    """A score by the last word of the answer."""
    last = (solution_str.replace(".", " ").split() or [""])[-1]
    return {"score": {"good": 1.0, "fair": 0.5}.get(last, 0.0)}
