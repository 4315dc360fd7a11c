"""The body of a request, read as the inputs of its generations."""

from __future__ import annotations

from typing import Any

from localtrace.trainer_hooks.http.answers import GENERATIONS_MAX

_PROMPT_FIELDS = ("input_ids", "token_ids", "prompt", "text")
"""Fields in which engines take token ids or text. The first one present is used."""
_KEPT_FIELDS = (
    "model", "messages", "tools", "input_embeds", "image_data", "video_data", "audio_data",
    "rid", "request_id",
)  # fmt: skip
"""Fields recorded as inputs of their own. All others are sampling parameters."""
_NOT_SAMPLING = frozenset((*_PROMPT_FIELDS, *_KEPT_FIELDS, "sampling_params"))


class Prompts:
    """The prompts of one request.

    Args:
        payload: the request's body, a JSON object.
        facts: further inputs of every generation.
    """

    def __init__(self, payload: dict[str, Any], facts: dict[str, Any]) -> None:
        self._payload = payload
        self._facts = facts
        self._prompts = _prompts(payload)
        self._sampling = payload.get("sampling_params")
        self._samples = self._sample_count()
        count = self._samples * (1 if self._prompts is None else len(self._prompts))
        self.count = count if count <= GENERATIONS_MAX else 1
        """Number of generations asked for."""

    def inputs(self, index: int) -> dict[str, Any]:
        """Return the inputs of the generation with this index in the answer."""
        number = index // self._samples
        inputs = self._inputs(_item(self._sampling, number))
        prompt = _prompt(self._payload) if self._prompts is None else _item(self._prompts, number)
        if prompt is not None:
            inputs["prompt_ids" if isinstance(prompt, list) else "prompt"] = prompt
        if "rid" in inputs:
            inputs["rid"] = _item(inputs["rid"], index)
        return inputs

    def all_inputs(self) -> dict[str, Any]:
        """Return the inputs of the whole request, for an answer without generations."""
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
    """Return the prompts of a batch; None if the request has a single prompt."""
    prompt = _prompt(payload)
    is_batch = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return prompt if is_batch else None


def _item(values: Any, index: int) -> Any:
    """Return the item of a list with one item per prompt, or a value given once for all."""
    if not isinstance(values, list):
        return values
    return values[index] if index < len(values) else None
