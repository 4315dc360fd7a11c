"""An AsyncGRPOTrainer on a CPU, with a worker that puts a script's samples into its queue.

TRL computes attention with a kernel for GPUs, asks for the name of the GPU, and wants vLLM to be
installed. These three functions are replaced; all else is TRL's own.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from tests.trl.training import QUESTIONS

LONGEST = 30
"""Tokens of the longest sample."""


def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the functions that need a GPU."""
    kernel = SimpleNamespace(flash_attn_varlen_func=_attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    starts_q: torch.Tensor, starts_k: torch.Tensor, *_: Any, softmax_scale: float, **__: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention of each segment to its path, causal at the end, as flash attention has it."""
    parts = []
    for q, k in zip(starts_q.unfold(0, 2, 1), starts_k.unfold(0, 2, 1), strict=True):
        own, keys, values = (
            rows[begin:end].transpose(0, 1)
            for rows, (begin, end) in ((query, q), (key, k), (value, k))
        )
        mask = torch.ones(own.shape[1], keys.shape[1], dtype=torch.bool)
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                own, keys, values, scale=softmax_scale, enable_gqa=True,
                attn_mask=mask.tril(keys.shape[1] - own.shape[1]),
            ).transpose(0, 1)
        )  # fmt: skip
    return torch.cat(parts)


class ObservedTrainer(AsyncGRPOTrainer):
    """Keeps the step and the logprobs of each batch that the loss sees."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert not any("localtrace" in name for name in inputs)
        logprobs = inputs["old_log_probs"][inputs["token_index"] >= 0]
        self.updates = getattr(self, "updates", [])
        self.updates.append((self.state.global_step, set(logprobs.tolist())))
        return super().compute_loss(model, inputs, *args, **kwargs)


class NoTransfer:
    """Sends no weights, since no server generates."""

    def send_weights(self, iterator: Iterator[Any]) -> None:
        for _ in iterator:
            pass

    def __getattr__(self, name: str) -> Any:
        return lambda: None


class ScriptedWorker:
    """Queues the samples of a script, those of the second weights once these are there.

    Args:
        first: number of samples of the first weights. The others are as many.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.script: list[RolloutSample] = []

    def update_model_version(self, model_version: int) -> None:
        if model_version < 3:
            begin = self.first * (model_version - 1)
            for place in range(begin, begin + self.first):
                self.script.append(sample_of(place, model_version))
                self.rollout_buffer.put(self.script[-1])

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        raise AssertionError("TRL takes more samples than the script has")


Reply = tuple[list[int], list[int], list[float]]
"""The prompt's ids, and the ids and logprobs of the answer."""


@contextlib.contextmanager
def serving(call: list[int]) -> Iterator[tuple[str, list[Reply]]]:
    """Serve completions as vLLM does, each with ids and logprobs of its own, and yield the address.

    Args:
        call: ids of every fourth answer, which calls a tool.
    """
    replies: list[Reply] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
            with lock:
                number = len(replies)
                ids = [*call, 2] if number % 4 == 0 else [70 + number, 71, 2]
                logprobs = [-(1 + number) / 16 - token / 1024 for token in range(len(ids))]
                replies.append((prompt, ids, logprobs))
            choice = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}
            body = json.dumps({"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", replies
    server.shutdown()
    server.server_close()


def sample_of(place: int, version: int) -> RolloutSample:
    """A sample whose ids and logprobs tell it from others; every third has two turns."""
    group, number = divmod(place, 2)
    mask = [0, 0, 0, 1, 1]
    completion = [{"role": "assistant", "content": f"answer {place}"}]
    if place % 3 == 0:
        mask += [0, 0, 1]
        result = {"role": "tool", "name": "add", "content": "7"}
        completion += [result, {"role": "assistant", "content": "so 7"}]
    mask += [1] * {3: LONGEST - len(mask)}.get(place, 0)
    ids = [5, 6, 60 + group, *(70 + place + token for token in range(len(mask) - 4))]
    ids.append(2 if number else 99)
    logprobs = [-(1 + place) / 16 - token / 1024 for token in range(len(mask))]
    scores = {"rewards/long": float(len(ids)), "rewards/reward": math.nan if place == 4 else 0.5}
    return RolloutSample(
        prompt=[{"role": "user", "content": QUESTIONS[group % len(QUESTIONS)]}],
        completion=completion,
        input_ids=np.array(ids),
        completion_mask=np.array(mask),
        old_log_probs=np.where(mask, np.float32(logprobs), np.float32(0)),
        advantage=number - 0.5 + place / 8,
        model_version=version,
        group_id=group,
        metrics={"reward": math.nan if place == 5 else place / 4, "reward_std": 0.5, **scores},
        enqueued_at=1_800_000_000.5 + place,
    )


def make_trainer(
    model: Path,
    folder: Path,
    worker: Any = None,
    tokenizer: Any = None,
    tools: Any = None,
    **settings: Any,
) -> Any:
    """A trainer of four updates, and new weights for the worker after every second."""
    chosen = {
        "token_budget": 0, "max_steps": 4, "weight_sync_steps": 2, "max_staleness": 0,
        "per_device_train_batch_size": 2, "num_generations": 2, "learning_rate": 0.01, "seed": 7,
        **settings,
    }  # fmt: skip
    return ObservedTrainer(
        model=str(model),
        reward_funcs=[total],
        args=AsyncGRPOConfig(
            str(folder), use_cpu=True, bf16=False, report_to="none", save_strategy="no",
            disable_tqdm=True, **chosen,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": text}]} for text in QUESTIONS]
        ),
        processing_class=tokenizer or AutoTokenizer.from_pretrained(model),
        tools=tools,
        rollout_worker=worker,
        weight_transfer=NoTransfer(),
    )  # fmt: skip


def total(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward; the process that generates imports it by its name."""
    return [float(sum(ids)) for ids in completion_ids]
