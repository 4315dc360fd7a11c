"""What we replay is what verl's own live tracing wrote, and a list of what comes on top.

verl's V0 workers roll out once, traced live by verl's own backend and recorded at the same time;
then the record is replayed beside the live traces, and both are read back through the tracker's
own client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from localtrace.reader import open_store
from localtrace.uploader import upload
from localtrace.uploader.receipt import Receipt
from localtrace.uploader.selection import Selection
from tests.servers.equivalence.run import run_live
from tests.servers.equivalence.trees import Node, comparable, differences, tree
from tests.servers.weave import WeaveServer
from tests.servers.weave_client import read_back

COVERED_ONLY_BY_US = {
    "Tools.run", "SingleTurn.run", "Failing.run", "AgentLoopWorker._compute_score",
    "FunctionTool.digits", "FunctionTool.double", "Add.execute",
}  # fmt: skip
"""Calls that verl's tracing does not see: overridden methods, tools, rewards."""
LEFT_OUT_AT_RECORDING = {"agent_data (dropped)"}


def names(forest: Iterable[Node]) -> Counter[str]:
    return sum((node.names() for node in forest), Counter())


def without(forest: Iterable[Node], left_out: set[str]) -> list[Node]:
    return [kept for node in forest for kept in node.without(left_out)]


def check_equal(live: list[Node], ours: list[Node], only_ours: set[str]) -> None:
    """Equal trees, but for calls that only we have; and those are what the docs say."""
    assert names(live)["LLMServerClient.generate"] > 10
    assert any(node.failed for node in live)
    added = set(names(ours)) - set(names(live))
    assert added == only_ours
    as_numbers = [numbers_of_numpy(root) for root in live]
    assert differences(comparable(as_numbers), comparable(without(ours, added))) == []


def check_receipt(receipt: Receipt) -> None:
    assert receipt.complete
    assert set(receipt.left_out) == LEFT_OUT_AT_RECORDING


@pytest.mark.parametrize("token2text", [True, False])
def test_mlflow_shows_the_same_as_after_verls_live_tracing(
    mlflow_url: str, tmp_path: Path, token2text: bool
) -> None:
    live, replayed = f"live {token2text}", f"replayed {token2text}"
    environment = {"MLFLOW_TRACKING_URI": mlflow_url}
    recorded = run_live(tmp_path / "run", "mlflow", token2text, live, environment)
    with open_store(recorded) as store:
        check_receipt(upload(store, Selection(), mlflow_url, container=replayed))
    client = MlflowClient(mlflow_url)
    trees = {name: mlflow_trees(client, name) for name in (live, replayed)}
    check_equal(trees[live], trees[replayed], COVERED_ONLY_BY_US)
    assert has_text(trees[live]) is token2text
    for query in ("tags.step = '1'", "tags.validate = 'True'", "trace.status = 'ERROR'"):
        found = [mlflow_trees(client, name, query) for name in (live, replayed)]
        assert len(found[0]) == len(found[1]) > 0


def mlflow_trees(client: MlflowClient, experiment: str, query: str | None = None) -> list[Node]:
    """The traces of an experiment; tags are attributes of the root."""
    place = client.get_experiment_by_name(experiment).experiment_id
    roots = []
    for trace in client.search_traces(locations=[place], filter_string=query, max_results=500):
        nodes = {
            span.span_id: Node(
                span.name,
                span.inputs,
                span.outputs,
                span.status.status_code.value == "ERROR",
                span.start_time_ns,
                {"exceptions": [event.attributes["exception.type"] for event in span.events]},
            )
            for span in trace.data.spans
        }
        (root,) = tree(nodes, {span.span_id: span.parent_id for span in trace.data.spans})
        tags = {name: trace.info.tags.get(name) for name in VERL_TAGS}
        root.attributes |= {**tags, "state": str(trace.info.state)}
        roots.append(root)
    return roots


VERL_TAGS = ("sample_index", "step", "rollout_n", "validate", "experiment_name")


def numbers_of_numpy(node: Node) -> Node:
    """Both clients write NumPy's numbers as text, `3` and `np.int64(3)`; we write the number."""
    for holder in (node.inputs, node.inputs and node.inputs.get("kwargs")):
        if isinstance(holder, dict) and isinstance(holder.get("priority"), str):
            digits = holder["priority"].removeprefix("np.int64(").removesuffix(")")
            holder["priority"] = int(digits)
    for child in node.children:
        numbers_of_numpy(child)
    return node


def has_text(forest: Iterable[Node]) -> bool:
    texts = [
        isinstance(node.outputs, dict) and bool(node.outputs.get("response_text"))
        for root in forest
        for node in [root, *below(root)]
    ]
    return any(texts)


def below(node: Node) -> list[Node]:
    return [one for child in node.children for one in (child, *below(child))]


def test_weave_shows_the_same_as_after_verls_live_tracing(
    weave_server: WeaveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, replayed = "team/live", "team/replayed"
    recorded = run_live(tmp_path / "run", "weave", True, live, weave_server.environment)
    for name, value in weave_server.environment.items():
        monkeypatch.setenv(name, value)
    with open_store(recorded) as store:
        check_receipt(upload(store, Selection(), kind="weave", container=replayed))
    forests = {
        name: weave_trees(read_back(weave_server, tmp_path, name)) for name in (live, replayed)
    }
    # Weave's own client writes `._` of a name as a dash.
    covered = {name.replace("._", "-") for name in COVERED_ONLY_BY_US}
    check_equal(forests[live], forests[replayed], covered | {"agent_loop"})
    assert has_text(forests[live])
    step = {"$eq": [{"$getField": "attributes.step"}, {"$literal": 1}]}
    found = {
        name: Counter(
            call["op_name"].rpartition("/")[2].partition(":")[0]
            for call in weave_server.calls(name, query={"$expr": step})
        )
        for name in (live, replayed)
    }
    assert found[live] == {name: found[replayed][name] for name in found[live]}
    assert found[live].total() > 10


def weave_trees(calls: list[dict[str, Any]]) -> list[Node]:
    """The calls of a project; verl's attributes are on every call."""
    nodes = {
        call["id"]: Node(
            call["func_name"],
            call["inputs"],
            call["output"],
            call["exception"] is not None,
            call["started_at"],
            {name: call["attributes"].get(name) for name in VERL_TAGS},
        )
        for call in calls
    }
    return tree(nodes, {call["id"]: call["parent_id"] for call in calls})


def test_the_comparison_finds_a_difference() -> None:
    one, other = (Node("run", {"a": 1}, [1, last], False, last) for last in (2, 3))
    assert differences(comparable([one]), comparable([other])) == ["[0].outputs[1]: '2' and '3'"]
    later = Node("run", {"a": 1}, [1, 2], False, 5)
    assert differences(comparable([one]), comparable([later])) == []
