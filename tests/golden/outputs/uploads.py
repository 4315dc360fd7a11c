"""What `localtrace upload` sends to each kind of tracker, caught by a server that answers as such.

The server takes everything and remembers nothing, so an upload sends all that it has. Calls and
spans are shown by trajectory: how they are spread over requests is not compared here.
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.golden.outputs.exports import VARIED, WITH_KEYS
from tests.golden.outputs.golden import Golden, Output, pretty_lines, without_digests
from tests.golden.outputs.otlp import decoded
from tests.hostile.servers import Request, serving

TRACKER = "http://tracker.test"
"""An address that is the same whatever port a test gets: the server is its proxy."""
Sent = list[tuple[str, Any]]
"""Path and decoded body of each request."""


@contextmanager
def _tracker(answer: Callable[[str, Any], Any]) -> Iterator[tuple[str, Sent]]:
    """Run a tracker; give its address and what it is sent."""
    sent: Sent = []

    def respond(request: Request) -> None:
        path = urlsplit(request.path).path
        if "protobuf" in request.headers.get("content-type", ""):
            is_gzip = request.headers.get("content-encoding") == "gzip"
            body = decoded(gzip.decompress(request.body) if is_gzip else request.body)
        elif request.body:
            body = json.loads(request.body)
        else:
            body = {k: v for k, (v, *_) in parse_qs(urlsplit(request.path).query).items()}
        sent.append((path, body))
        said = answer(path, body)
        request.reply(200, {}, said if isinstance(said, bytes) else json.dumps(said).encode())

    with serving(respond) as url:
        yield url, sent


def _upload(golden: Golden, answer: Callable[[str, Any], Any], *arguments: str | Path) -> Any:
    with pytest.MonkeyPatch.context() as variables, _tracker(answer) as (url, sent):
        for name, value in {
            "LOCALTRACE_STATE_DIR": tempfile.mkdtemp(dir=golden.folder), "WANDB_API_KEY": "k" * 40,
            "WANDB_ENTITY": "team", "WANDB_BASE_URL": "", "HTTP_PROXY": url, "NO_PROXY": "",
        }.items():  # fmt: skip
            variables.setenv(name, value)
        # Nothing can be read back, which is an error where a tracker can be asked.
        printed = golden.run("upload", "--uri", TRACKER, *arguments, exit_code=None)
    return sent, "".join(
        re.findall(r"(?m)^(?:into|parameters|left out|redacted|not s).*\n", printed)
    )


def _weave_answer(path: str, body: Any) -> Any:
    if path == "/server_info":
        return {"min_required_weave_python_version": "0.0.1"}
    if path == "/feedback/query":
        return {"result": []}
    return {"count": 0} if path == "/calls/query_stats" else b""


def _weave(golden: Golden, *arguments: str | Path) -> str:
    sent, printed = _upload(golden, _weave_answer, "--to", "weave", *arguments)
    calls = [call for path, body in sent if path.endswith("/complete") for call in body["batch"]]
    calls.sort(key=lambda call: (call["started_at"], call["ended_at"], call["id"]))
    feedback = [
        body
        for path, body in sent
        # Announcements of uploads have ids that no two uploads share.
        if path == "/feedback/create" and body["feedback_type"] != "localtrace.upload"
    ]
    feedback.sort(key=lambda one: (one["weave_ref"], one["id"]))
    paths = sorted({path for path, _ in sent})
    return golden.plain(pretty_lines(without_digests([paths, *calls, *feedback])) + printed)


_EXPERIMENT = {"experiment": {"experiment_id": "1", "creation_time": 0}}
_RUN = {"info": {"run_id": "0123456789abcdef"}, "data": {}}


def _mlflow_answer(path: str, body: Any) -> Any:
    if path == "/version":
        return b"3.14.0"
    if path.endswith("get-by-name"):
        return _EXPERIMENT
    return {"run": _RUN} if path.endswith(("runs/create", "runs/get")) else {}


def _mlflow(golden: Golden, *arguments: str | Path) -> str:
    sent, printed = _upload(golden, _mlflow_answer, "--to", "mlflow", *arguments)
    ends = ("runs/create", "runs/update", "log-batch")
    requests = [[path, body] for path, body in sent if path.endswith(ends)]
    requests.sort(key=lambda one: (one[0], json.dumps(one[1])))
    for _, body in requests:
        for tag in body.get("tags", ()):
            tag["value"] = "TIME" if tag["key"] == "localtrace.made_at_ns" else tag["value"]
    return golden.plain(pretty_lines(without_digests([*requests, *_spans(sent)])) + printed)


def _assessments(golden: Golden) -> str:
    chosen = ("labelled=true", "--assessments")
    sent, printed = _upload(golden, _mlflow_answer, "--to", "mlflow", *chosen)
    assessed = [body["trace"] for path, body in sent if path.endswith("mlflow/traces")]
    assessed.sort(key=lambda trace: trace["trace_info"]["request_time"])
    return pretty_lines(assessed) + printed


def _otlp(golden: Golden, *arguments: str | Path) -> str:
    sent, printed = _upload(golden, lambda *_: b"", "--to", "otlp", *arguments)
    return golden.plain(pretty_lines(without_digests(_spans(sent))) + printed)


def _spans(sent: Sent) -> list[Any]:
    """Return the spans of all requests by trajectory, after the resource and scope they are of."""
    spans = []
    for path, body in sent:
        for resource in body.get("resourceSpans", ()) if path.endswith("/v1/traces") else ():
            for scope in resource.pop("scopeSpans"):
                own = scope.pop("spans", [])
                spans += [[one["startTimeUnixNano"], one["endTimeUnixNano"], one["spanId"],
                           {"of": [resource, scope]} | one] for one in own]  # fmt: skip
    spans.sort(key=lambda one: one[:3])
    shown, before = [], None
    for *_, span in spans:
        of = span.pop("of")
        shown += [span] if of == before else [of, span]
        before = of
    return shown


OUTPUTS: dict[str, Output] = {
    "weave": lambda golden: _weave(golden, VARIED, "--assessments"),
    "weave-redacted": lambda golden: _weave(golden, WITH_KEYS, "--redact", golden.rules),
    "mlflow": lambda golden: _mlflow(golden, VARIED, "--metrics"),
    "mlflow-assessments": _assessments,
    "mlflow-redacted": lambda golden: _mlflow(golden, WITH_KEYS, "--redact", golden.rules),
    "otlp": lambda golden: _otlp(golden, VARIED, "where=name = 'team' or run_id = 'chat-1'"),
    "otlp-redacted": lambda golden: _otlp(golden, WITH_KEYS, "--redact", golden.rules),
}
