"""Lets `weave.trace_server` be imported without the cloud packages that a test never reaches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

PACKAGES = {"azure", "boto3", "botocore", "confluent_kafka", "litellm", "openai", "redis"}
MODULES = (
    "google.api_core",
    "google.auth",
    "google.cloud",
    "google.oauth2",
    "weave.trace_server.model_providers",  # not in the wheel
)


class _StubType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StubType(name, (Stub,), {})

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class Stub(Exception, metaclass=_StubType):
    """Stands for any class of an absent package; some of them are named in except clauses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class _StubModule(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _StubType(name, (Stub,), {}))
        return self.__dict__[name]


class _StubImporter(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in PACKAGES or f"{name}.".startswith(
            tuple(f"{module}." for module in MODULES)
        ):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def install() -> None:
    """Answer imports of absent packages from now on; call it before importing weave's server."""
    sys.meta_path.insert(0, _StubImporter())
