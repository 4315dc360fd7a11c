"""Every output of the golden rollouts is what it was: see the package's docstring."""

from __future__ import annotations

import pytest

from tests.golden.outputs.comparing import EXPECTED, NEEDED, OUTPUTS, difference, expected_path
from tests.golden.outputs.golden import Golden, make_golden


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return make_golden(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("name", sorted(OUTPUTS.keys() - NEEDED.keys()))
def test_an_output_is_what_it_was(golden: Golden, name: str) -> None:
    changed = difference(name, OUTPUTS[name](golden))
    assert not changed, f"{changed}\nif it is meant: python -m tests.golden.outputs --write {name}"


def test_every_file_is_of_an_output() -> None:
    assert set(EXPECTED.rglob("*.txt")) == set(map(expected_path, OUTPUTS))
