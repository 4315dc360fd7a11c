"""The job of `drive` in one process, without Ray and without this hook."""

from __future__ import annotations

import asyncio
import pickle
import sys
from pathlib import Path
from unittest import mock

import transfer_queue
from verl.experimental.agent_loop.agent_loop import AgentLoopManager

from tests.verl.agent_loops.drive import (
    BATCHES,
    batches_v1,
    begin_v0,
    begin_v1,
    end_v0,
    end_v1,
)
from tests.verl.agent_loops.job import RESPONSE_TOKENS, WORKERS_V0
from tests.verl.agent_loops.light import Local, Workshop, workshop
from tests.verl.agent_loops.policy import PolicyServer
from tests.verl.agent_loops.results import Result
from tests.verl.trainers import in_memory


def main(folder: Path, model: Path) -> None:
    """Write what verl gave to result.pickle."""
    queue = in_memory.Queue()
    functions = {name: getattr(queue, name) for name in in_memory.FUNCTIONS}
    with (
        mock.patch.multiple(transfer_queue, **functions),
        workshop(folder, model) as shop,
    ):
        shop.server = PolicyServer(str(model), RESPONSE_TOKENS // 2)
        result = asyncio.run(_run(shop, queue))
    assert "localtrace" not in sys.modules
    (folder / "result.pickle").write_bytes(pickle.dumps(result))


async def _run(shop: Workshop, queue: in_memory.Queue) -> Result:
    result = Result({})
    manager = AgentLoopManager(shop.config, None)
    manager.agent_loop_workers = [Local(shop.worker()) for _ in range(WORKERS_V0)]
    for step, validate in BATCHES:
        await shop.server.set_step(step)
        batch, record = begin_v0(step, validate)
        result.v0.append(end_v0(record, await manager.generate_sequences(batch)))
    worker = shop.worker("v1", queue=queue)
    for record in batches_v1():
        await shop.server.set_step(record.step)
        await worker.generate_sequences(begin_v1(record))
        await asyncio.gather(*worker.background_tasks, return_exceptions=True)
        result.v1.append(end_v1(record))
    result.failed = result.v1.pop()
    result.generations = shop.server.generations
    return result
