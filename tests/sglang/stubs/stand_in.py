"""Packages that SGLang imports names of and, on a CPU, never calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn


class Placeholder:
    """Any attribute, to any depth; a base class that adds nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} is a stand-in that cannot be called")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class _Submodules(MetaPathFinder, Loader):
    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(self._prefix):
            return None
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = attributes_of(module.__name__)


def attributes_of(module: str) -> Callable[[str], Placeholder]:
    """The `__getattr__` of a module that has everything."""
    return Placeholder(module).__getattr__


def accept_submodules(package: str) -> None:
    """Let every submodule of a package be imported."""
    sys.meta_path.append(_Submodules(package))
