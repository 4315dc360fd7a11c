"""What a job of SkyRL runs against: a tiny tokenizer, an engine's server, an environment, workers.

All else is SkyRL's own: its dataset, client, generator, trainers, advantages and trackers. The
engine's answers depend only on the prompt's length and on how often it answered in the session;
what it sent is kept, for the tests to compare with.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import skyrl_gym
import torch
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteInferenceClient,
)
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.tracking import Tracking
from skyrl_gym.envs.base_text_env import BaseTextEnv
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, with the marks of a chat template."""
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE({piece: number for number, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = Decoder()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=_TEMPLATE,
    )


class Engine:
    """An inference server that answers by a script, and keeps what it sent."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.sent: dict[str, list[dict[str, Any]]] = {}
        """Generations in their order, by session."""
        self.fails_at: str | None = None
        """A session that gets an error."""
        self.ends = True
        """Whether generations that stop end with the last token, or by a text to stop at."""

    def answer(self, session: str, prompt: list[int]) -> dict[str, Any]:
        """Return a generation: some tokens, which end with the last one or are cut off."""
        with self._lock:
            turn = self._asked[session]
            self._asked[session] += 1
        chance = random.Random(f"{session}-{turn}-{len(prompt)}")
        ids = [chance.randrange(60, 90) for _ in range(chance.randrange(2, 7))]
        stops = chance.random() < 0.7
        ids += [self._end] if stops and self.ends else []
        generation = {
            "prompt": prompt,
            "ids": ids,
            "logprobs": [-chance.random() for _ in ids],
            "finish": "stop" if stops else "length",
        }
        self.sent.setdefault(session, []).append(generation)
        return generation


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """Serve an engine on a free port, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            session = self.headers.get("X-Session-ID", "")
            status, reply = 200, {}
            if self.path == "/inference/v1/generate":
                if session == engine.fails_at:
                    status, reply = 400, {"error": {"message": "the engine is out of memory"}}
                else:
                    sent = engine.answer(session, json.loads(body)["token_ids"])
                    values = [{"logprob": value} for value in sent["logprobs"]]
                    reply = {"choices": [{
                        "token_ids": sent["ids"], "logprobs": {"content": values},
                        "finish_reason": sent["finish"],
                    }]}  # fmt: skip
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class Guessing(BaseTextEnv):
    """An environment of as many turns as its row says, which pays by the length of each guess."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()
        self._turns = extras["turns"]
        self._fixed = extras["fixed"]

    def step(self, action: str) -> Any:
        self.turns += 1
        done = self.turns >= self._turns
        told = [] if done else [{"role": "user", "content": f"No. Turn {self.turns} is over."}]
        reward = 0.5 if self._fixed else float(len(action))
        return {"observations": told, "reward": reward, "done": done, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {"guesses": self.turns}


if "guessing" not in skyrl_gym.envs.registration.registry:
    skyrl_gym.register("guessing", entry_point=Guessing)


class Workers:
    """SkyRL's dispatch to its GPU workers: logprobs by a script, and updates that do nothing."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.given: list[Any] = []
        """The batches that were trained on, as the workers get them."""

    def get_lcm_dp_size(self) -> int:
        return 2

    def init_weight_sync_state(self, client: Any) -> None: ...

    async def save_weights_for_sampler(self) -> None:
        self._client.increment_weight_version()

    def stage_data(self, model: str, data: Any, boundaries: Any) -> list[Any]:
        self.given.append(copy.deepcopy(data))
        return [data]

    def forward(self, model: str, data: Any) -> Any:
        width = data.metadata["response_length"]
        rows = data["sequences"][:, -width:].float() / -100
        return SimpleNamespace(loss_fn_outputs=[{"logprobs": row.tolist()} for row in rows])

    def forward_from_staged(self, model: str, chunk: Any) -> Any:
        self.given.pop()  # staged for the logprobs, not for an update
        return self.forward(model, chunk)

    def forward_backward_from_staged(self, model: str, chunk: Any) -> Any:
        return SimpleNamespace(metrics={"final_loss": 0.25})

    def optim_step(self, model: str) -> float:
        return 1.0

    def get_timing_metrics(self) -> dict[str, float]:
        return {}

    def empty_cache(self, *_: Any) -> None: ...

    def finalize_pending_saves(self, *_: Any) -> None: ...


def observed(kind: type[RayPPOTrainer]) -> type[RayPPOTrainer]:
    """Return a trainer that keeps copies of what passes through it."""

    class Observed(kind):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.batches: list[dict[str, Any]] = []
            super().__init__(*args, **kwargs)
            self.dispatch = Workers(self.inference_engine_client)

        def convert_to_training_input(self, generator_output: Any, uids: Any) -> Any:
            kept = {name: copy.deepcopy(value) for name, value in generator_output.items()}
            self.batches.append({"output": kept, "uids": list(uids), "step": self.global_step})
            return super().convert_to_training_input(generator_output, uids)

        def train_critic_and_policy(self, data: Any) -> Any:
            self.batches[-1]["data"] = {
                name: value.clone() for name, value in data.items() if torch.is_tensor(value)
            }
            return super().train_critic_and_policy(data)

    return Observed


class Job:
    """A training of SkyRL with scripted engine and workers.

    Args:
        settings: options of SkyRL, by their dotted names.
    """

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        address: str,
        *,
        trainer: type[RayPPOTrainer] = RayPPOTrainer,
        generator: Any = SkyRLGymGenerator,
        turns: int = 1,
        fixed: int = 0,
        **settings: Any,
    ) -> None:
        self.engine = engine
        self.rows = [
            {
                "prompt": [{"role": "user", "content": f"Guess number {number}."}],
                "env_class": "guessing",
                "turns": turns,
                "fixed": number < fixed,
                "data_source": "guesses",
                "reward_spec": {"method": "rule", "ground_truth": str(number)},
            }
            for number in range(8)
        ]
        file = folder / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, self.rows)))
        options = {
            "trainer.project_name": "guesses",
            "trainer.run_name": "first",
            "trainer.placement.colocate_all": False,
            "trainer.train_batch_size": 2,
            "trainer.policy_mini_batch_size": 2,
            "trainer.eval_batch_size": 4,
            "trainer.max_training_steps": 2,
            "trainer.eval_interval": 0,
            "trainer.eval_before_train": False,
            "trainer.ckpt_interval": 0,
            "trainer.resume_mode": "none",
            "generator.inference_engine.enable_ray_prometheus_stats": False,
            "trainer.logger": "console",
            "trainer.algorithm.use_kl_loss": False,
            "trainer.algorithm.advantage_estimator": "grpo",
            "data.dataloader.num_workers": 0,
            "data.dataloader.persistent_workers": False,
            "trainer.export_path": str(folder),
            "generator.n_samples_per_prompt": 2,
            "generator.max_turns": turns,
            "generator.max_input_length": 4096,
            **settings,
        }
        self.config = SkyRLTrainConfig.from_cli_overrides(options)
        tokenizer = make_tokenizer()
        client = RemoteInferenceClient(
            proxy_url=address, server_urls=[address], data_parallel_size=1, tokenizer=tokenizer
        )
        data = PromptDataset([str(file)], tokenizer, 4096, num_workers=1)
        made = generator(
            generator_cfg=self.config.generator,
            skyrl_gym_cfg=self.config.environment.skyrl_gym,
            inference_engine_client=client,
            tokenizer=tokenizer,
        )
        self.trainer: Any = observed(trainer)(
            cfg=self.config,
            tracker=Tracking("guesses", "first", "console", self.config),
            tokenizer=tokenizer,
            train_dataset=data,
            eval_dataset=data,
            inference_engine_client=client,
            generator=made,
        )

    def train(self) -> None:
        """Train to the end."""
        asyncio.run(self.trainer.train())
