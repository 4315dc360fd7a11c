"""A job with another version of SGLang: `python -m tests.sglang.old_version MODEL ANSWERS`."""

from __future__ import annotations

import json
import sys
from typing import Any

from localtrace.trainer_hooks.sglang import wrap
from tests.sglang.answers import newest, payloads
from tests.sglang.conftest import SETTINGS
from tests.sglang.forked import fork_processes


def generate(engine: Any, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Every generation that a request gave."""
    payload = {("prompt" if name == "text" else name): value for name, value in payload.items()}
    result = engine.generate(**payload)
    if payload["stream"]:
        return newest(result)
    return result if isinstance(result, list) else [result]


def main() -> None:
    """Generate with the plugin alone, then also wrapped, and write down what came."""
    import sglang

    model, answers = sys.argv[1:]
    fork_processes()
    engine = sglang.Engine(model_path=model, **SETTINGS)
    # It cannot compute the logprobs of a prompt without an accelerator.
    requests = [payload for payload in payloads(36) if "logprob_start_len" not in payload]
    received = [answer for payload in requests[:16] for answer in generate(engine, payload)]
    wrap(engine)
    received += [answer for payload in requests[16:] for answer in generate(engine, payload)]
    encode = engine.tokenizer_manager.tokenizer.encode
    with open(answers, "w") as file:
        json.dump({"version": sglang.__version__, "ids": encode("one two"), "all": received}, file)
    engine.shutdown()


if __name__ == "__main__":
    main()
