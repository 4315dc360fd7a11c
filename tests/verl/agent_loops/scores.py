"""The reward function; verl loads this file."""


def compute_score(data_source, solution_str, ground_truth, extra_info, **_):
    """A score between 0 and 1 that depends on the whole answer."""
    score = sum(solution_str.encode()) % 101 / 101
    return {"score": score, "has_answer": ground_truth in solution_str, "length": len(solution_str)}
