"""The golden rollouts in verl's own workers and trainer; nothing of localtrace is used.

The server says what the script says and notes the tokens; everything else is verl's.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transfer_queue
from transfer_queue import KVBatchMeta
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.utils import tensordict_utils as tu

from tests.golden.verl.script import (
    PROMPTS,
    PROMPTS_V0,
    ROLLOUTS,
    STEP,
    Prompt,
    engine_logprob,
    reference_logprob,
    trainer_logprob,
)
from tests.verl.agent_loops.drive import batch_v0, batch_v1
from tests.verl.agent_loops.light import Local, Workshop, workshop
from tests.verl.trainers import in_memory, sessions, v0
from tests.verl.trainers.whole import buffer

HERE = Path(__file__).resolve().parent
OVERRIDES = (
    f"actor_rollout_ref.rollout.multi_turn.function_tool_path={HERE}/abilities.py",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path=null",
    f"reward.custom_reward_function.path={HERE}/scores.py",
    "actor_rollout_ref.rollout.response_length=400",
    f"actor_rollout_ref.rollout.n={ROLLOUTS}",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
)


@dataclass
class Noted:
    """One turn as the server gave it."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Server:
    """Says what the script says, part by part."""

    def __init__(self, tokenizer: Any, prompts: dict[str, Prompt]) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._parts: dict[tuple[str, int], list[tuple[int, int]]] = {
            (uid, n): [
                (turn, part)
                for turn, made in enumerate(session.turns)
                for part in range(len(made.parts))
            ]
            for uid, prompt in prompts.items()
            for n, session in enumerate(prompt.sessions)
        }
        self.noted: dict[tuple[str, int], list[Noted]] = {key: [] for key in self._parts}

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        uid, _, session = str(sampling_params["seed"]).partition("/")
        key = uid, int(session) % ROLLOUTS  # V0 counts the rows of the batch
        if not self._parts[key]:
            raise RuntimeError("the engine is gone")
        at, part = self._parts[key].pop(0)
        turn = self._prompts[uid].sessions[key[1]].turns[at]
        is_last = part == len(turn.parts) - 1
        ids = self._tokenizer.encode(turn.parts[part])
        if is_last and turn.finish == "stop":
            ids.append(self._tokenizer.eos_token_id)
        if part == 0:
            self.noted[key].append(Noted(list(prompt_ids)))
        noted = self.noted[key][-1]
        places = range(len(noted.ids), len(noted.ids) + len(ids))
        logprobs = [engine_logprob(*at) for at in zip(ids, places, strict=True)]
        noted.ids += ids
        noted.logprobs += logprobs
        await asyncio.sleep(0)
        return TokenOutput(
            token_ids=ids,
            log_probs=logprobs,
            stop_reason=turn.finish if is_last else "aborted",
            num_preempted=0,
            extra_fields={"global_steps": turn.weights[part]},
        )


class Workers(sessions.Workers):
    """The actor's workers: a model says of each token what it thinks of the next."""

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        return self._of(batch, trainer_logprob)

    def compute_ref_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        return self._of(batch, reference_logprob)

    def _of(self, batch: KVBatchMeta, logprob: Any) -> KVBatchMeta:
        rows = [self.queue.fields[batch.partition_id][key]["input_ids"] for key in batch.keys]
        values = [torch.tensor([*map(logprob, ids.tolist()[1:]), 0.0]) for ids in rows]
        nested = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        fields = tu.get_tensordict({"log_probs": nested, "entropy": nested.clone()})
        return self.queue.kv_batch_put(batch.keys, batch.partition_id, fields)


@dataclass
class Truth:
    """The generations of each session."""

    turns: dict[tuple[str, int], list[Noted]]
    tokenizer: Any


def row(uid: str, index: int) -> dict[str, Any]:
    """A prompt as verl's dataset has it."""
    return {
        "raw_prompt": [{"role": "user", "content": f"What is {uid}?"}],
        "data_source": "fruit",
        "reward_model": {"style": "rule", "ground_truth": "good"},
        "extra_info": {"index": index},
        "index": index,
        "tools_kwargs": {},
        "agent_name": "tool_agent",
        "uid": uid,
    }


def run_v0(folder: Path, model: Path, trainer: v0.Trainer) -> Truth:
    """One batch through V0's workers, and its trainer's update with all groups but one."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    with workshop(folder, model, *OVERRIDES) as shop:
        server = Server(tokenizer, PROMPTS_V0)
        shop.server = server  # type: ignore[assignment]
        shop.trace("localtrace")
        batch = asyncio.run(_roll_out_v0(shop))
    trainer.global_steps = STEP
    ids = batch.batch["responses"].tolist()
    for name, logprob in (("old_log_probs", trainer_logprob), ("ref_log_prob", reference_logprob)):
        batch.batch[name] = torch.tensor([[logprob(token) for token in row] for row in ids])
    batch.batch["token_level_scores"] = batch.batch["rm_scores"]
    batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
    kept = np.array([uid != "plum" for uid in batch.non_tensor_batch["uid"]])
    trainer._update_actor(v0.padded(v0.compute(v0.balanced(batch.select_idxs(kept)))))
    return Truth(server.noted, tokenizer)


async def _roll_out_v0(shop: Workshop) -> Any:
    manager = AgentLoopManager(shop.config, None)
    manager.agent_loop_workers = [Local(shop.worker())]
    prompts = [row(uid, index) for index, uid in enumerate(PROMPTS_V0)]
    batch = batch_v0(prompts, STEP).repeat(ROLLOUTS, interleave=True)
    made = await manager.generate_sequences(batch)
    made.non_tensor_batch["uid"] = batch.non_tensor_batch["uid"]
    return made


def run_v1(folder: Path, model: Path) -> Truth:
    """All prompts through V1's workers, one step of the trainer over what is in the queue."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    queue = in_memory.Queue()
    functions = {name: getattr(queue, name) for name in in_memory.FUNCTIONS}
    with (
        mock.patch.multiple(transfer_queue, **functions),
        workshop(folder, model, *OVERRIDES) as shop,
    ):
        server = Server(tokenizer, PROMPTS)
        shop.server = server  # type: ignore[assignment]
        shop.trace("localtrace")
        asyncio.run(_roll_out(shop, queue))
        _train(queue)
    return Truth(server.noted, tokenizer)


async def _roll_out(shop: Workshop, queue: in_memory.Queue) -> None:
    worker = shop.worker("v1", "FullyAsyncLLMServerClient", queue)
    for index, (uid, prompt) in enumerate(PROMPTS.items()):
        partition = "val" if prompt.validate else "train"
        tag = {"is_prompt": True, "status": "pending", "global_steps": prompt.step}
        queue.kv_batch_put([uid], partition, tags=[tag])
        await worker.generate_sequences(batch_v1([row(uid, index)], prompt.step, prompt.validate))
    await asyncio.gather(*worker.background_tasks, return_exceptions=True)


def _train(queue: in_memory.Queue) -> None:
    made = buffer(ReplayBufferAsync, lambda count: None, filter_groups_metric="reward")
    batch, _ = made.sample(global_steps=STEP, partition_id="train", batch_size=2)
    assert {key.split("_")[0] for key in batch.keys} == {"apple", "fig"}
    trainer = sessions.Trainer(queue)
    trainer.global_steps = STEP
    trainer.actor_rollout_wg = trainer.ref_policy_wg = Workers(queue)
    trainer._update_actor(trainer.compute(copy.deepcopy(batch)), {})
