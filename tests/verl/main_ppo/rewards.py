"""The reward function; verl loads this file in its reward workers."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info, **_):
    """By the answer's number; one that is always the same for a question that all get right."""
    number = int(re.findall(r"is (\d+)", solution_str)[-1])
    score = 0.5 if ground_truth == "even" else (number % 5) / 4
    return {"score": score, "number": number}
