"""What was asked of an engine: the body of a request as the inputs of its generations."""

from __future__ import annotations

from typing import Any

_PROMPT_FIELDS = ("input_ids", "token_ids", "prompt", "text")
"""Where engines take token ids or text; the first that is there."""
_KEPT_FIELDS = (
    "model", "messages", "tools", "input_embeds", "image_data", "video_data", "audio_data",
    "rid", "request_id",
)  # fmt: skip
"""What stays a field of its own; the rest are sampling parameters."""
_NOT_SAMPLING = frozenset((*_PROMPT_FIELDS, *_KEPT_FIELDS, "sampling_params"))
GENERATIONS_MAX = 65_536
"""No engine is asked for more at once; a larger number is nonsense."""


class Prompts:
    """The prompts of one request.

    Args:
        payload: its body, a JSON object.
        facts: inputs of every generation besides.
    """

    def __init__(self, payload: dict[str, Any], facts: dict[str, Any]) -> None:
        self._payload = payload
        self._facts = facts
        self._prompts = _prompts(payload)
        self._sampling = payload.get("sampling_params")
        self._samples = self._sample_count()
        count = self._samples * (1 if self._prompts is None else len(self._prompts))
        self.count = count if count <= GENERATIONS_MAX else 1
        """How many generations were asked for."""

    def inputs(self, index: int) -> dict[str, Any]:
        """What the generation at this place of the answer was made from."""
        number = index // self._samples
        inputs = self._inputs(_item(self._sampling, number))
        prompt = _prompt(self._payload) if self._prompts is None else _item(self._prompts, number)
        if prompt is not None:
            inputs["prompt_ids" if isinstance(prompt, list) else "prompt"] = prompt
        if "rid" in inputs:
            inputs["rid"] = _item(inputs["rid"], index)
        return inputs

    def all_inputs(self) -> dict[str, Any]:
        """What the whole request was made of, where its generations cannot be told apart."""
        if self._prompts is None:
            return self.inputs(0)
        return {**self._inputs(self._sampling), "prompts": self._prompts}

    def _inputs(self, sampling: Any) -> dict[str, Any]:
        payload = self._payload
        inputs = {name: payload[name] for name in _KEPT_FIELDS if name in payload}
        inputs |= self._facts
        rest = {name: value for name, value in payload.items() if name not in _NOT_SAMPLING}
        if not isinstance(sampling, dict):
            sampling = {} if sampling is None else {"sampling_params": sampling}
        return {**inputs, "sampling_params": {**rest, **sampling}}

    def _sample_count(self) -> int:
        for fields in (self._payload, _item(self._sampling, 0)):
            n = fields.get("n") if isinstance(fields, dict) else None
            if type(n) is int and 1 < n <= GENERATIONS_MAX:
                return n
        return 1


def _prompt(payload: dict[str, Any]) -> Any:
    values = (payload.get(name) for name in _PROMPT_FIELDS)
    return next((value for value in values if value is not None), None)


def _prompts(payload: dict[str, Any]) -> list[Any] | None:
    """One item per prompt of a batch; None where it is none."""
    prompt = _prompt(payload)
    is_batch = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return prompt if is_batch else None


def _item(values: Any, index: int) -> Any:
    """One of a list, where it is one for each; else the value for all."""
    if not isinstance(values, list):
        return values
    return values[index] if index < len(values) else None
