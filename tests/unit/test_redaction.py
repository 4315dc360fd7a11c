"""What must not leave a store does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localtrace
from localtrace.codec import to_json
from localtrace.errors import ConfigError
from localtrace.placeholder import Placeholder
from localtrace.reader import Store
from localtrace.trajectories import read_batch
from localtrace.types import Trajectory
from localtrace.uploader.redaction import IDS_COUNT, Redaction

KEY = "sk-" + "a1B2" * 10
SECRETS = {
    "openai or anthropic key": "sk-ant-api03-" + "x" * 40,
    "hugging face token": "hf_" + "A" * 34,
    "github token": "ghp_" + "z9" * 18,
    "gitlab token": "glpat-" + "q" * 20,
    "aws access key": "AKIA" + "B" * 16,
    "google api key": "AIza" + "C" * 35,
    "slack token": "xoxb-" + "1234567890-abc",
    "w&b key": "WANDB_API_KEY=" + "0123456789" * 4,
    "json web token": "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.abc-_",
    "bearer header": "Authorization: Bearer " + "t" * 20,
    "private key": "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    "password in a url": "postgres://me:hunter2@db/x",
}


def spell(text: str) -> list[int]:
    """Ids of a toy tokenizer: one per letter, above the small numbers that masks are made of."""
    return [ord(letter) + 100 for letter in text]


def decode(run_id: str, ids: list[int]) -> str:
    return "".join(chr(one - 100) for one in ids)


@localtrace.op
def generate(prompt_ids: list[int], messages: list[Any], **more: Any) -> dict[str, Any]:
    reply = more.pop("reply", "fine, thank you")
    return {"output_ids": spell(reply), "output_logprobs": [-0.5] * len(reply), **more}


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Any]:
    """Record one trajectory of two turns and open its store."""
    opened: list[Store] = []

    def record(
        prompt: str = "how are you?", reply: str = "fine, thank you", **attributes: Any
    ) -> tuple[Store, Trajectory]:
        folder = tmp_path / str(len(opened))
        localtrace.init(folder, min_free_bytes=0, seal=False)
        with localtrace.trajectory(step=1, sample_index=2) as t:
            first = [{"role": "user", "content": "how are you?"}]
            generate(spell(prompt), first, reply=reply)
            more = [*first, {"role": "assistant", "content": "fine"}]
            generate(spell(prompt + reply + " and?"), more, note="plain", response_mask=[1] * 20)
            t.set(**attributes)
        localtrace.close()
        opened.append(localtrace.open_store(folder))
        return opened[-1], opened[-1].trajectory(t.trace_id)

    yield record
    for store in opened:
        store.close()


def test_a_trajectory_without_matches_stays_the_same_object(recorded) -> None:
    _, trajectory = recorded(note={"a": ["b", 1]})
    redaction = Redaction.load(None)
    assert redaction.trajectory(trajectory, decode) is trajectory
    assert not redaction.counts


@pytest.mark.parametrize("name", SECRETS)
def test_common_keys_are_replaced_wherever_they_stand(recorded, name) -> None:
    secret = SECRETS[name]
    _, trajectory = recorded(deep={"list": [{secret: f"it is {secret}."}]}, data=secret.encode())
    redaction = Redaction.load(None)
    safe = to_json(redaction.trajectory(trajectory, decode).attributes)
    assert secret.rpartition(" ")[2].rpartition("=")[2] not in safe
    assert f"[redacted: {name}]" in safe
    assert redaction.counts[name] == 3


def test_ordinary_text_is_left_alone() -> None:
    redaction = Redaction.load(None)
    text = (
        "sk-learn and sk-image, task-1234567890123456789012, bearer of news, https://host:80/a@b, "
        "commit 0123456789012345678901234567890123456789, AKIA, eyJ.eyJ., time 12:30 @ noon"
    )
    assert redaction.text(text) == text


def test_tokens_that_spell_a_key_are_left_out_with_all_ids(recorded) -> None:
    _, trajectory = recorded(prompt=f"use {KEY} now")
    redaction = Redaction.load(None)
    safe = redaction.trajectory(trajectory, decode)
    for span in safe.spans:
        assert span.prompt_ids is None
        assert span.output_ids is None
        assert span.inputs["prompt_ids"] == Placeholder("redacted", "list")
        assert span.outputs["output_ids"] == Placeholder("redacted", "list")
        assert span.output_logprobs
    assert safe.spans[1].outputs["response_mask"] == [1] * 20
    assert redaction.counts == {IDS_COUNT: 1}


def test_a_key_that_begins_in_the_prompt_and_ends_in_the_output_is_found(recorded) -> None:
    _, trajectory = recorded(prompt=f"it is {KEY[:12]}", reply=KEY[12:])
    assert Redaction.load(None).trajectory(trajectory, decode).spans[0].output_ids is None


def test_a_key_in_a_message_takes_the_ids_too(recorded) -> None:
    _, trajectory = recorded(note=KEY)
    assert Redaction.load(None).trajectory(trajectory, lambda *_: None).spans[0].prompt_ids is None


def test_fields_of_a_file_are_left_out_and_ids_stay(recorded, tmp_path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[field]]\nname = "ground_truth"\n\n[[field]]\nname = "note"\n')
    _, trajectory = recorded(deep={"ground_truth": 4})
    redaction = Redaction.load(rules)
    safe = redaction.trajectory(trajectory, decode)
    assert safe.attributes == {"deep": {"ground_truth": Placeholder("redacted", "int")}}
    assert safe.spans[1].outputs["note"] == Placeholder("redacted", "str")
    assert safe.spans[1].prompt_ids == trajectory.spans[1].prompt_ids
    assert redaction.counts == {"ground_truth": 1, "note": 2}  # an argument and a result


def test_patterns_of_a_file_come_on_top_or_instead(tmp_path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[pattern]]\nname = "person"\nregex = "Ada|Grace"\nreplace = "somebody \\\\1"\n'
    )
    assert Redaction.load(rules).text(f"Ada has {KEY}") == (
        "somebody \\1 has [redacted: openai or anthropic key]"
    )
    rules.write_text(f"defaults = false\n{rules.read_text()}")
    assert KEY in Redaction.load(rules).text(KEY)


def test_redacting_twice_changes_nothing_more(recorded) -> None:
    _, trajectory = recorded(note=KEY, secrets=list(SECRETS.values()))
    once = Redaction.load(None).trajectory(trajectory, decode)
    again = Redaction.load(None)
    assert again.trajectory(once, decode) is once
    assert not again.counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[pattern", "are wrong"),
        ('[[pattern]]\nname = "a"', "missing required field `regex`"),
        ('[[pattern]]\nname = "a"\nregex = "("', "the regex of 'a' cannot be read"),
        ('[[pattern]]\nname = "a"\nregex = "x*"', "matches the empty text"),
        ('[[patern]]\nname = "a"\nregex = "x"', "unknown field `patern`"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path, text, message) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Redaction.load(rules)


def test_a_file_that_is_not_there_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot read the rules"):
        Redaction.load(tmp_path / "none.toml")


@pytest.mark.parametrize("where", ["attribute", "prompt", "nowhere"])
def test_rows_of_the_tables_read_back_as_the_redacted_trajectory(recorded, where) -> None:
    text = f"use {KEY} now" if where == "prompt" else "plain"
    store, trajectory = recorded(prompt=text, note=KEY if where == "attribute" else "x")
    redaction = Redaction.load(None)

    def rows(table: str) -> list[dict[str, Any]]:
        return store.sql(f"select * from stored.{table}").to_dicts()

    edited = redaction.rows(rows("trajectories"), rows("spans"), rows("outcomes"), decode)
    assert reread(store, trajectory, edited) == Redaction.load(None).trajectory(trajectory, decode)


def reread(store: Store, trajectory: Trajectory, edited: Any) -> Trajectory:
    """Read a trajectory from edited rows instead of the store's own."""
    import pyarrow as pa

    from localtrace.schema import TABLES

    tables = {
        name: pa.Table.from_pylist(rows, TABLES[name].arrow())
        for name, rows in zip(("trajectories", "spans", "outcomes"), edited, strict=True)
    }

    def run_sql(sql: str, params: Any) -> pa.Table:
        if "stored.spans" in sql:
            return tables["spans"].sort_by("seq")
        found = store.sql(sql, params).to_arrow()
        if "all_trajectories" in sql:
            attributes = found.column_names.index("attributes")
            found = found.set_column(attributes, "attributes", tables["trajectories"]["attributes"])
        return found

    (read,) = read_batch(run_sql, lambda *_: None, [trajectory.trace_id])
    return read
