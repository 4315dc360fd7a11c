"""A small agent whose methods verl's tracing decorates, and its traces in a real MLflow."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any


class Tokenizer:
    """Enough for verl's token2text."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def agent_of(op: Callable[..., Any]) -> Any:
    """The agent, its methods decorated."""

    class Agent:
        tokenizer = Tokenizer()

        @op
        async def generate(self, prompt_ids: list[int], limit: int = 2) -> Any:
            return {"prompt_ids": prompt_ids, "token_ids": prompt_ids[:limit]}

        @op
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            made = await self.generate([3, 4, 5])
            return {"score": self.score(made["token_ids"]), **kwargs}

        @op
        def score(self, ids: list[int]) -> int:
            return sum(ids)

        @op
        async def fail(self) -> None:
            raise ValueError("no sandbox")

    return Agent()


async def _trace(op: Callable[..., Any], attr: Callable[..., Any]) -> Any:
    agent = agent_of(op)
    results = [await agent.run({"temperature": 1.0}, uid="u")]
    with attr(step=3, sample_index=17, rollout_n=1, name="agent_loop"):
        results.append(await agent.run({"temperature": 0.5}, uid="v"))
        with attr(step=4, validate=True, trace=False):
            results.append(await agent.run({"temperature": 0.0}))
    try:
        with attr(step=5, sample_index="a"):
            await agent.fail()
    except ValueError as error:
        results.append(str(error))
    return results


def run_agent(
    tracing: ModuleType, backend: str | None, *, own: bool, token2text: bool = False
) -> Any:
    """Start tracing and run the agent; `own`: with verl's own functions, which the hook keeps."""
    tracing.RolloutTraceConfig.reset()
    tracing.RolloutTraceConfig.init("arithmetic", "tiny", backend, token2text)
    op, attr = tracing.rollout_trace_op, tracing.rollout_trace_attr
    if own:
        op, attr = op.__wrapped__, attr.__wrapped__
    return asyncio.run(_trace(op, attr))


def main(folder: str) -> None:
    """Print what MLflow has got by verl alone, through the hook, and beside a recording."""
    import mlflow
    from verl.utils import rollout_trace

    logged = []
    for backend, own in (("mlflow", True), ("mlflow", False), ("localtrace+mlflow", False)):
        os.environ["MLFLOW_TRACKING_URI"] = f"file://{folder}/mlflow-{len(logged)}"
        run_agent(rollout_trace, backend, own=own, token2text=True)
        mlflow.flush_trace_async_logging()
        traces = mlflow.search_traces(return_type="list")
        logged.append(sorted(map(_described, traces)))
    print(json.dumps(logged))


def _described(trace: Any) -> str:
    names = {span.span_id: span.name for span in trace.data.spans}
    spans = [
        (span.name, names.get(span.parent_id), span.inputs, span.outputs, str(span.status))
        for span in trace.data.spans
    ]
    tags = {name: tag for name, tag in trace.info.tags.items() if not name.startswith("mlflow.")}
    return repr((spans, sorted(tags.items())))
