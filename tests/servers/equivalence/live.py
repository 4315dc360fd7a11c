"""Rollouts that verl traces live while they are recorded: `python -m … DIR TARGET TOKEN2TEXT`.

V0's workers, because only they trace live. The store is where LOCALTRACE_STORE says.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError
from verl.experimental.agent_loop.agent_loop import AgentLoopManager

from tests.verl.agent_loops.drive import batch_v0, run_v0
from tests.verl.agent_loops.job import Cluster, compose, rows
from tests.verl.agent_loops.model import write_model

FAILING_STEP = 9
UNTRACED_TOOL = "tests.verl.agent_loops.toolbox.Add"
TRACED_TOOL = "tests.servers.equivalence.toolbox.Add"


def main(folder: Path, target: str, token2text: str, project: str) -> None:
    model = write_model(folder / "model")
    trace = "actor_rollout_ref.rollout.trace"
    config = compose(
        folder, model,
        f"{trace}.backend=localtrace+{target}", f"{trace}.token2text={token2text}",
        f"trainer.project_name={project}",
    )  # fmt: skip
    tools = folder / "tools.yaml"
    tools.write_text(tools.read_text().replace(UNTRACED_TOOL, TRACED_TOOL))
    cluster = Cluster(config, model)
    try:
        surroundings = {"reward_loop_worker_handles": [cluster.reward]}
        manager = AgentLoopManager.create(config, cluster.client, **surroundings)
        run_v0(cluster, manager, 1, validate=False)
        run_v0(cluster, manager, 5, validate=False)
        run_v0(cluster, manager, 2, validate=True)
        cluster.set_step(FAILING_STEP)
        for agent in ("failing", "breaking"):
            prompts = rows("v0", FAILING_STEP, (agent,) * 2)
            # Each by itself: the manager would not wait for one after another has failed.
            for worker, row in zip(manager.agent_loop_workers, prompts, strict=True):
                with contextlib.suppress(RayTaskError):
                    ray.get(worker.generate_sequences.remote(batch_v0([row], FAILING_STEP)))
        for worker in manager.agent_loop_workers:
            ray.get(worker.__ray_call__.remote(_flush, target))
    finally:
        ray.shutdown()


def _flush(worker: Any, target: str) -> None:
    import localtrace

    localtrace.flush()
    if target == "mlflow":
        import mlflow

        mlflow.flush_trace_async_logging()
    else:
        from verl.utils.rollout_trace import RolloutTraceConfig

        client: Any = RolloutTraceConfig.get_client()
        client.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:5])
