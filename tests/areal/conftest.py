"""AReaL's own rollouts and actor, against an engine's server that answers by a script."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from localtrace.trainer_hooks import areal as hook
from tests.environment import unavailable
from tests.recorded_jobs import _fresh_process, store

__all__ = ["_fresh_process", "store"]

hook.install()  # before AReaL is imported, as in a job
try:
    import areal.infra.remote_inf_engine  # noqa: F401
except ImportError as error:
    unavailable(f"areal cannot be imported: {error}")

from areal.api.cli_args import InferenceEngineConfig  # noqa: E402
from areal.engine.sglang_remote import RemoteSGLangEngine  # noqa: E402


class Server:
    """An SGLang server that answers by a script, and keeps what it sent."""

    END = 1

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.fails_for: int | None = None
        """First token of prompts that get an error."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._reply(200, {})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                prompt = json.loads(body)["input_ids"]
                if prompt[0] == server.fails_for:
                    self._reply(400, {"error": "out of memory"})
                    return
                self._reply(200, server.answer(prompt))

            def _reply(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.address = f"127.0.0.1:{self._http.server_address[1]}"

    def answer(self, prompt: list[int]) -> dict[str, Any]:
        """Return a generation in SGLang's words."""
        chance = random.Random(len(self.sent))
        stops = chance.random() < 0.6
        ids = [chance.randrange(10, 90) for _ in range(chance.randrange(2, 6))]
        ids += [self.END] if stops else []
        logprobs = [-chance.random() for _ in ids]
        finish = "stop" if stops else "length"
        self.sent.append({"prompt": prompt, "ids": ids, "logprobs": logprobs, "finish": finish})
        pairs = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
        return {"meta_info": {"finish_reason": {"type": finish}, "output_token_logprobs": pairs}}

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    """An engine's server."""
    server = Server()
    yield server
    server.close()


@pytest.fixture
def engine(server: Server, tmp_path: Path) -> Iterator[Any]:
    """AReaL's client of it, with its executor of workflows."""
    config = InferenceEngineConfig(
        experiment_name="sums", trial_name="first", fileroot=str(tmp_path),
        max_concurrent_rollouts=8, consumer_batch_size=2, max_head_offpolicyness=8,
        request_retries=1, check_trajectory_format=True,
    )  # fmt: skip
    engine = RemoteSGLangEngine(config)
    engine.initialize(addr=server.address, train_data_parallel_size=1)
    engine.set_version(3)
    yield engine
    engine.destroy()
