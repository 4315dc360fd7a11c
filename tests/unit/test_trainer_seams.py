"""Replacement of a trainer's functions, on a trainer of one module."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from localtrace.trainer_hooks.seams import Seams
from localtrace.trainer_hooks.verl import operations


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("a_trainer")
    exec("def train(steps):\n    return steps", vars(module))
    monkeypatch.setitem(sys.modules, "a_trainer", module)
    return module


def test_a_hook_that_is_installed_twice_sees_a_call_once(trainer: Any) -> None:
    seams, seen = Seams(), []
    seams.before("a_trainer", "train")(lambda steps: seen.append(steps))
    seams.install()
    seams.install()
    assert trainer.train(3) == 3
    assert seen == [3]


def test_a_base_class_keeps_what_it_does_with_its_subclasses() -> None:
    known: list[Any] = []

    class Parent:
        def __init_subclass__(cls, **options: Any) -> None:
            known.append(("Parent", cls.__name__, options))

    class Tool(Parent):
        def __init_subclass__(cls, **options: Any) -> None:
            known.append(("Tool", cls.__name__, options))
            super().__init_subclass__(**options)

    known.clear()
    operations._record_subclasses(Tool, "execute", lambda function: lambda self: "decorated")

    class Add(Tool, color="red"):
        def execute(self) -> str:
            return "plain"

    assert known == [("Tool", "Add", {"color": "red"}), ("Parent", "Add", {"color": "red"})]
    assert Add().execute() == "decorated"
